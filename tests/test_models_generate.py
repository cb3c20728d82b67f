"""The main job: its options' errors, two of its ways in eager mode, and its verdict."""

import types

import pytest
import torch
from rich.console import Console

from models import generate
from models.config import KDAConfig
from models.decode import Decoded
from models.model import KDAForCausalLM
from models.persistence import load_model, save_model
from models.ways import PLAIN, RECOVER, UNTOUCHED, Measured, run_way

TINY = KDAConfig(
    hidden_size=32,
    num_heads=2,
    head_k_dim=8,
    head_v_dim=16,
    gate_rank=8,
    intermediate_size=48,
    max_length=256,
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    model = KDAForCausalLM(TINY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "conv1d" not in name:
                # A large tied embedding makes the text repeat itself, so that prompt lookup has something to find.
                parameter.normal_(std=1.0 if "embed" in name else 0.2)
    directory = tmp_path_factory.mktemp("weights")
    save_model(model, directory)
    return directory


def eager(step, **options):
    """Stands in for torch.compile, and holds the main job to what it promises: one graph, static shapes."""
    assert options["fullgraph"] and options["dynamic"] is False
    return step


BAD_OPTIONS = {
    "drafts-negative": (["--drafts", "-1"], "--drafts should be in 0..15, got -1"),
    "drafts-too-many": (["--drafts", "16"], "--drafts should be in 0..15, got 16"),
    "no-tokens": (["--tokens", "0"], "--tokens should be at least 1, got 0"),
    "no-requests": (["--batch", "0"], "--batch should be at least 1, got 0"),
    "no-threads": (["--threads", "0"], "--threads should be at least 1, got 0"),
    "cold": (["--temperature", "-0.5"], "--temperature should be finite and not negative, got -0.5"),
    "nan": (["--temperature", "nan"], "--temperature should be finite and not negative, got nan"),
    "empty-prompt": (["--prompt", ""], "--prompt is empty"),
    "unknown-file": (["--file", "no/such/file.py"], "--file no/such/file.py: No such file"),
    "file-is-a-directory": (["--file", "."], "--file .: Is a directory"),
    "too-long": (["--prompt", "x" * 200, "--tokens", "49"], "make 257 positions; the model was trained for 256"),
    "too-many-tokens": (["--tokens", "256"], "the model was trained for 256"),
    "two-prompts": (["--prompt", "a", "--file", "b"], "not allowed with argument"),
    "unknown-dtype": (["--dtype", "int8"], "invalid choice: 'int8'"),
}


def message_of(capsys):
    # argparse breaks the usage, not the message; blanks are normalised all the same.
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused_by_name(name, weights, capsys):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(SystemExit) as exit_:
        generate.main(["--weights", str(weights), "--device", "cpu", *options])
    assert exit_.value.code == 2
    assert message in message_of(capsys)


def test_missing_weights_say_how_to_get_them(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main(["--weights", str(tmp_path), "--device", "cpu"])
    assert exit_.value.code == 2
    assert f"no config.json in {tmp_path}: train a model with `python -m models.train" in message_of(capsys)


def test_empty_file_is_refused(tmp_path, weights, capsys):
    path = tmp_path / "empty.py"
    path.touch()
    with pytest.raises(SystemExit):
        generate.main(["--weights", str(weights), "--device", "cpu", "--file", str(path)])
    assert f"--file {path} is empty" in message_of(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(weights, capsys):
    with pytest.raises(SystemExit):
        generate.main(["--weights", str(weights), "--device", "cuda"])
    assert "--device cuda: this PyTorch sees no CUDA GPU" in message_of(capsys)


def test_saved_weights_are_rounded_once_and_come_back(weights):
    model = load_model(weights)
    assert model.config == TINY
    assert not model.training
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().float())


@pytest.mark.parametrize("batch", [1, 3])
def test_two_ways_give_one_text_and_their_measurements(batch, weights):
    model = load_model(weights)
    prompts = [b"def f(x):\n    return f(x)\n"[i:] for i in range(batch)]
    streamed = bytearray()
    options = dict(num_tokens=40, num_drafts=5, compile_step=eager)
    plain = run_way(PLAIN, model, prompts, **options)
    speculative = run_way(UNTOUCHED, model, prompts, on_emit=lambda b, x: b or streamed.extend(x), **options)
    assert plain.decoded.continuations == speculative.decoded.continuations
    assert [len(text) for text in plain.decoded.continuations] == [40] * batch
    assert bytes(streamed) == plain.decoded.continuations[0]
    assert plain.decoded.tokens_per_step == 1
    assert speculative.decoded.tokens_per_step > 1
    # Three KDA layers: float32 states of 2 heads, and 3 inputs of 2*16 + 32 convolution channels.
    assert plain.state_bytes == speculative.state_bytes == 4 * 3 * (2 * 8 * 16 + 3 * 64)
    # The untouched step holds the states of all 6 positions of all 3 layers at once, plain decoding those of one.
    states = 4 * 3 * 2 * 8 * 16
    assert speculative.step_peak_bytes - plain.step_peak_bytes > 5 * states


def measured(way, *texts):
    return Measured(way, Decoded(list(texts)), 0.0, 1, 2, 3)


def test_first_difference_names_way_request_and_byte():
    same = [measured(PLAIN, b"abc", b"xyz"), measured(UNTOUCHED, b"abc", b"xyz")]
    assert generate.first_difference(same) is None
    other = measured(RECOVER, b"abc", b"xyw")
    assert generate.first_difference([*same, other]) == (
        "'speculative, recoverssm' leaves plain decoding at byte 2 of request 1: b'z' != b'w'"
    )


@pytest.mark.parametrize(("broken", "temperature", "status"), [(False, 0, 0), (True, 0, 1), (True, 0.9, 0)])
def test_exit_status_follows_the_texts(broken, temperature, status, weights, monkeypatch):
    def fake_way(way, model, prompts, **options):
        result = run_way(UNTOUCHED if way is RECOVER else way, model, prompts, compile_step=eager, **options)
        if way is RECOVER and broken:
            result.decoded.continuations[0] = b"?" + result.decoded.continuations[0][1:]
        return Measured(way, *list(vars(result).values())[1:])

    report = types.SimpleNamespace(matched=2, refused=1)
    monkeypatch.setattr(generate, "run_way", fake_way)
    monkeypatch.setattr(generate, "explain_rewrite", lambda *args: report)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    options = ["--weights", str(weights), "--device", "cpu", "--tokens", "12", "--temperature", str(temperature)]
    assert generate.run(generate.argument_parser().parse_args(options), console) == status
    shown = console.export_text()
    assert "2 of 3" in shown
    if temperature:
        assert "distribution only" in shown and "identical" not in shown
    else:
        assert ("leaves plain decoding at byte 0 of request 0" in shown) == broken
        assert ("All three texts are identical." in shown) == (not broken)

"""``python -m models.serve``: options' errors, the demo, a soak, and its verdict."""

import argparse
import dataclasses
import os
import signal

import pytest
import torch
from rich.console import Console

from models import progress, serve
from models.captured_step import CapturedStep
from models.config import KDAConfig
from models.engine import Engine
from models.model import KDAForCausalLM
from models.persistence import save_model
from models.serve_options import BACKENDS, GRAPHS
from models.slots import SlotAllocator

TINY = KDAConfig(
    hidden_size=32,
    num_heads=2,
    head_k_dim=8,
    head_v_dim=16,
    gate_rank=8,
    intermediate_size=48,
    max_length=128,
)
DEMO = ["--requests", "6", "--slots", "3", "--tokens", "12", "--prompt-length", "40", "--block-size", "8"]
SOAK = ["--soak", "25", "--slots", "4", "--tokens", "8", "--prompt-length", "20", "--arrival-rate", "1"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    model = KDAForCausalLM(TINY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "conv1d" not in name:
                parameter.normal_(std=1.0 if "embed" in name else 0.2)
    directory = tmp_path_factory.mktemp("weights")
    save_model(model, directory)
    return directory


def serve_(options, weights):
    """Exit status and what was printed."""
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    options = serve.argument_parser().parse_args(["--weights", str(weights), "--device", "cpu", *options])
    return serve.run(options, console), console.export_text()


def cell(shown, name):
    (line,) = (line for line in shown.splitlines() if line.startswith(f"│ {name} "))
    return line.strip("│").split("│")[1].strip()


@pytest.mark.parametrize("cache", [True, False])
def test_demo(cache, weights):
    options = [*DEMO, "--check", "4", "--preemption-rate", "0.3", "--cache-mib", "0.5" if cache else "0"]
    status, shown = serve_(options, weights)
    assert status == 0
    assert "All 4 compared texts are those of solo decoding." in shown
    assert cell(shown, "requests finished") == "6"
    assert cell(shown, "new tokens").startswith("72 in ")
    assert cell(shown, "slots leaked") == "0"
    assert cell(shown, "texts compared") == "4 of 6"
    assert cell(shown, "memory allocated").endswith("(as planned)")
    assert ("prefix hits" in shown) == cache
    preempted = cell(shown, "preemptions").split()
    assert int(preempted[0]) + int(preempted[3]) > 0


def test_soak(weights):
    status, shown = serve_(SOAK, weights)
    assert status == 0
    assert "All 25 compared texts are those of solo decoding." in shown
    assert cell(shown, "texts compared") == "25 of 25"
    # The same seed, the same schedule.
    again = serve_(SOAK, weights)[1]
    assert cell(again, "rows") == cell(shown, "rows") and cell(again, "blocks") == cell(shown, "blocks")
    other = serve_([*SOAK, "--seed", "1"], weights)[1]
    assert cell(other, "rows") != cell(shown, "rows")


def stop_at(monkeypatch, owner, name, call):
    """SIGTERM, as a time limit sends it, when a function is called for the n-th time."""
    function, calls = getattr(owner, name), []

    def stopped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, stopped)


def test_a_soak_that_is_stopped_compares_what_has_finished(weights, monkeypatch):
    stop_at(monkeypatch, Engine, "step", 18)
    status, shown = serve_(SOAK, weights)
    assert status == 130
    compared, _, requests = cell(shown, "texts compared").split()
    assert 0 < int(compared) < 25 and requests == "25"
    assert cell(shown, "requests finished") == compared
    assert f"All {compared} compared texts are those of solo decoding." in shown
    assert f"Stopped: {25 - int(compared)} texts were not compared." in shown
    # Requests that still run hold their slots by right.
    assert "leaked" not in shown and int(cell(shown, "slots in use")) > 0


def test_a_comparison_that_is_stopped_says_how_far_it_came(weights, monkeypatch):
    stop_at(monkeypatch, serve.SoloTexts, "expected", 4)
    status, shown = serve_(SOAK, weights)
    assert status == 130 and cell(shown, "requests finished") == "25"
    assert cell(shown, "texts compared") == "3 of 25" and "Stopped: 22 texts were not compared." in shown


def test_a_soak_that_is_stopped_while_it_warms_up(weights, monkeypatch):
    stop_at(monkeypatch, Engine, "warm_up", 1)
    status, shown = serve_(SOAK, weights)
    assert status == 130 and "stopped before the first step" in shown and "texts" not in shown


def test_where_there_is_no_terminal_progress_is_lines(weights, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    assert "serving: " not in serve_(SOAK, weights)[1]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    shown = serve_(SOAK, weights)[1]
    assert "comparing with solo decoding: 7 of 25\n" in shown and "decoding alone: 25 of 25" in shown
    assert "serving: 25 of 25, 0 running, 0 waiting, " in shown


def test_of_many_errors_the_first_are_shown(weights, monkeypatch):
    monkeypatch.setattr(serve, "difference", lambda request, expected, index, model: f"request {index} differs")
    monkeypatch.setattr(serve.SoloTexts, "expected", lambda self, request: b"")
    status, shown = serve_(SOAK, weights)
    assert status == 1 and "request 9 differs" in shown and "request 10 differs" not in shown
    assert "15 more texts leave solo decoding" in shown


def test_another_text_is_an_error_and_is_located(weights, monkeypatch):
    read = Engine._read

    def misread(tokens, num_accepted):
        """Every newly sampled token is another one."""
        tokens = torch.where(tokens >= 0, (tokens + 1) % 256, tokens)
        return read(tokens, num_accepted)

    monkeypatch.setattr(Engine, "_read", staticmethod(misread))
    status, shown = serve_([*DEMO, "--check", "2"], weights)
    assert status == 1
    assert "request 0 leaves solo decoding at token 0: b'" in shown and "request 1 leaves" in shown
    assert "(the two most likely tokens there are " in shown
    assert "compared texts are those" not in shown


def test_a_leaked_slot_is_an_error(weights, monkeypatch):
    release, kept = SlotAllocator.release, []

    def forget_one(self, slot):
        if not kept:
            kept.append(slot)
            return
        release(self, slot)

    monkeypatch.setattr(SlotAllocator, "release", forget_one)
    status, shown = serve_([*DEMO, "--check", "0"], weights)
    assert status == 1 and "slots leaked: 1" in shown and cell(shown, "slots leaked") == "1"


def test_unplanned_memory_is_an_error(weights, monkeypatch):
    build = serve.EngineShape.build

    def larger(self, *arguments, **options):
        return build(dataclasses.replace(self, max_length=self.max_length + 1), *arguments, **options)

    monkeypatch.setattr(serve.EngineShape, "build", larger)
    status, shown = serve_([*DEMO, "--check", "0"], weights)
    assert status == 1 and "bytes, planned {'pools'" in shown and "as planned" not in shown


BAD_OPTIONS = {
    "no-requests": (["--requests", "0"], "--requests should be at least 1, got 0"),
    "no-soak": (["--soak", "0"], "--soak should be at least 1, got 0"),
    "no-slots": (["--slots", "0"], "--slots should be at least 1, got 0"),
    "no-batch-sizes": (["--batch-sizes", "0"], "--batch-sizes should be at least 1, got 0"),
    "no-tokens": (["--tokens", "0"], "--tokens should be at least 1, got 0"),
    "no-prompt": (["--prompt-length", "0"], "--prompt-length should be at least 1, got 0"),
    "no-block": (["--block-size", "0"], "--block-size should be at least 1, got 0"),
    "no-threads": (["--threads", "0"], "--threads should be at least 1, got 0"),
    "check-negative": (["--check", "-1"], "--check should be at least 0, got -1"),
    "drafts-too-many": (["--drafts", "16"], "--drafts should be in 0..15, got 16"),
    "cache-negative": (["--cache-mib", "-1"], "--cache-mib should be finite and not negative, got -1.0"),
    "cache-nan": (["--cache-mib", "nan"], "--cache-mib should be finite and not negative, got nan"),
    "cache-too-small": ([*DEMO, "--cache-mib", "0.001"], "--cache-mib 0.001 holds no block: one takes"),
    "no-arrivals": (["--arrival-rate", "0"], "--arrival-rate should be positive and finite, got 0.0"),
    "always-preempted": (["--preemption-rate", "1"], "--preemption-rate should be in 0..1, less than 1, got 1.0"),
    "too-long": (["--prompt-length", "100", "--tokens", "21"], "make 129 positions; the model is made for 128"),
    "soak-too-long": (["--soak", "5", "--prompt-length", "80"], "make 110 positions; the model is made for 96"),
    "unknown-graphs": (["--graphs", "maybe"], "invalid choice: 'maybe'"),
    "graphs-of-a-cpu": (["--graphs", "manual"], "--graphs manual needs --device cuda"),
    "inductor-graphs-of-a-cpu": (
        ["--graphs", "inductor", "--backend", "recoverssm"],
        "--graphs inductor needs --device cuda",
    ),
    "unknown-backend": (["--backend", "onnx"], "invalid choice: 'onnx'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused_by_name(name, weights, capsys):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(SystemExit) as exit_:
        serve.main(["--weights", str(weights), "--device", "cpu", *options])
    assert exit_.value.code == 2
    # argparse breaks the usage, not the message; blanks are normalised all the same.
    assert message in " ".join(capsys.readouterr().err.split())


def test_missing_weights_say_how_to_get_them(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        serve.main(["--weights", str(tmp_path), "--device", "cpu"])
    assert exit_.value.code == 2
    assert "train a model with" in " ".join(capsys.readouterr().err.split())


def options_of(monkeypatch, *given):
    """As on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = serve.argument_parser().parse_args(given)
    serve.check_options(options)
    return options


def test_graphs_of_an_eager_step_are_not_inductor_s(monkeypatch):
    with pytest.raises(serve.UsageError, match="--graphs inductor needs --backend inductor or recoverssm"):
        options_of(monkeypatch, "--device", "cuda", "--graphs", "inductor")


@pytest.mark.parametrize("backend", ["eager", "inductor", "recoverssm"])
def test_graphs_and_backend_decide_what_the_engine_calls(backend, monkeypatch):
    compiled = []

    def fake_compile(step, **settings):
        compiled.append(settings)
        return lambda *arguments: step(*arguments)

    monkeypatch.setattr(torch, "compile", fake_compile)

    def function(*given):
        options = options_of(monkeypatch, "--backend", backend, *given)
        return serve.step_function(options)(torch.nn.Identity())

    settings = {"backend": backend, "fullgraph": True, "dynamic": False, "options": None}
    on_cpu = function("--device", "cpu")
    by_default = function("--device", "cuda")
    by_hand = function("--device", "cuda", "--graphs", "manual")
    assert not isinstance(on_cpu, CapturedStep)
    assert isinstance(by_default, CapturedStep) and isinstance(by_hand, CapturedStep)
    assert compiled == ([] if backend == "eager" else [settings] * 3)
    assert isinstance(by_hand.step, torch.nn.Identity) == (backend == "eager")
    if backend != "eager":
        assert not isinstance(function("--device", "cuda", "--graphs", "inductor"), CapturedStep)
        assert compiled[-1] == settings | {"options": {"triton.cudagraphs": True}}
    assert not isinstance(function("--device", "cuda", "--graphs", "none"), CapturedStep)


@pytest.mark.parametrize("graphs", ["inductor", "manual", "none"])
def test_a_graph_that_inductor_skips_is_an_error(graphs):
    read = lambda: torch._inductor.config.triton.cudagraph_or_error  # noqa: E731
    before = read()
    with serve.no_graph_skipped(argparse.Namespace(graphs=graphs)):
        assert read() == (graphs == "inductor")
    assert read() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("backend", "graphs"),
    [(b, g) for b in BACKENDS for g in GRAPHS if (b, g) != ("eager", "inductor")],
)
def test_soak_on_a_gpu(backend, graphs, weights):
    """Short windows and two batch sizes: compilation, nearly all of the time here, grows with both."""
    torch.compiler.reset()
    options = [*SOAK, "--drafts", "2", "--batch-sizes", "2", "--device", "cuda", "--backend", backend]
    status, shown = serve_([*options, "--graphs", graphs], weights)
    assert status == 0, shown
    assert "All 25 compared texts are those of solo decoding." in shown
    assert ("beside the planned memory" in shown) == (graphs == "manual")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(weights, capsys):
    with pytest.raises(SystemExit):
        serve.main(["--weights", str(weights), "--device", "cuda"])
    assert "--device cuda: this PyTorch sees no CUDA GPU" in " ".join(capsys.readouterr().err.split())

"""The planner: sizes or a config in, a table or JSON out, and one clear line for whatever is wrong with them."""

import copy
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recoverssm_ops import plan

ROOT = Path(__file__).parent.parent
KIMI_K3 = "--layers 69 --heads 96 --full-attention-layers 24 --kv-elements 576 --tensor-parallel 8"

# What the planner reads of the public config of Kimi-Linear-48B-A3B, and fields it must not mistake for it.
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_type": "kimi_linear",
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def run(capsys, arguments: str) -> str:
    assert plan.main(shlex.split(arguments)) == 0
    return capsys.readouterr().out


def run_json(capsys, arguments: str) -> dict:
    return json.loads(run(capsys, f"{arguments} --json"))


def write(path: Path, config) -> Path:
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


def figures(text: str) -> dict[str, tuple[str, str]]:
    """Label -> both figures of a plain text table."""
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def test_the_documented_command_prints_the_documented_table(capsys):
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    command = re.search(r"```bash\nrecoverssm-plan (.*)\n```", page)[1]
    table = re.search(r"```text\n(.*?)```", page, re.DOTALL)[1]
    assert run(capsys, command) == table


def test_the_documented_python_runs(capsys):
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["config"].spec == names["spec"]
    assert capsys.readouterr().out.splitlines()[-1] == f"8 {names['layout'].slot_bytes}"


def test_published_figures_in_the_table(capsys):
    rows = figures(run(capsys, f"{KIMI_K3} --requests 64"))
    assert rows["slots per request"] == ("8", "1")
    assert rows["slot (what is copied, moved, published)"] == ("57.81 MiB", "53.57 MiB")
    assert rows["request at rest"] == ("462.52 MiB", "53.57 MiB")
    assert rows["+ records u, k, g in a step"][1] == "6.47 MiB"
    assert rows["64 requests in a step"][0] == "28.91 GiB"


def test_as_a_command():
    """``python -m`` in a fresh process; a pipe gets plain text."""
    command = [sys.executable, "-m", "recoverssm_ops.plan", *shlex.split(KIMI_K3)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert figures(done.stdout)["request at rest"] == ("462.52 MiB", "53.57 MiB")


def test_console_script_is_declared():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    name, module, function = re.search(r'\[project\.scripts\]\n(\S+) = "(\S+):(\S+)"', text).groups()
    assert (name, module, function) == ("recoverssm-plan", plan.__name__, plan.main.__name__)


@pytest.mark.parametrize("installed", [True, False], ids=["rich", "no rich"])
def test_terminal(capsys, monkeypatch, installed):
    """With rich and without, a terminal shows every row and the summary."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    if not installed:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = plan.plain_table(plan.plan_from(plan.argument_parser().parse_args(shlex.split(f"{KIMI_K3} --budget 4GiB"))))
    shown = run(capsys, f"{KIMI_K3} --budget 4GiB")
    assert ("─" in shown) == installed
    for label, both in figures(plain).items():
        assert any(label in line and all(x in line for x in both) for line in shown.splitlines()), label
    assert plain.splitlines()[-1] in shown


def test_json_agrees_with_itself(capsys):
    """Exact bytes: totals follow from the parts, fits from the totals, tokens from what is freed."""
    answer = run_json(capsys, f"{KIMI_K3} --requests 10 --context 1000 --budget 46.48GiB")
    kv = 24 * 576 * 2
    assert (answer["kv_bytes_per_token"], answer["budget"]) == (kv, 4648 * 2**30 // 100)
    for layout in answer["layouts"].values():
        slot = answer["num_layers"] * sum(part["bytes"] for part in layout["state_parts"].values())
        transient = answer["num_layers"] * sum(part["bytes"] for part in layout["transient_parts"].values())
        assert (layout["slot_bytes"], layout["transient_bytes"]) == (slot, transient)
        assert layout["step_bytes"] == layout["slots_per_request"] * slot + transient
        fit = layout["requests_that_fit"]
        assert fit * (layout["step_bytes"] + 1000 * kv) <= answer["budget"]
        assert (fit + 1) * (layout["step_bytes"] + 1000 * kv) > answer["budget"]
        tokens = layout["tokens_that_fit"]
        assert 0 <= answer["budget"] - 10 * layout["step_bytes"] - tokens * kv < kv
    plain, recoverssm = answer["layouts"]["plain"], answer["layouts"]["recoverssm"]
    assert answer["freed_bytes"] == 10 * (plain["step_bytes"] - recoverssm["step_bytes"])
    assert answer["tokens_gained"] == answer["freed_bytes"] // kv
    assert abs(recoverssm["tokens_that_fit"] - plain["tokens_that_fit"] - answer["tokens_gained"]) <= 1


@pytest.mark.parametrize("nested", [False, True], ids=["top level", "text_config"])
def test_config_of_kimi_linear(capsys, tmp_path, nested):
    config = {"model_type": "kimi_k3", "text_config": KIMI_LINEAR} if nested else KIMI_LINEAR
    write(tmp_path / "config.json", config)
    for path in (tmp_path, tmp_path / "config.json"):
        answer = run_json(capsys, f"--config {path} --tensor-parallel 4 --drafts 3")
        assert (answer["num_layers"], answer["window"]) == (20, 4)
        assert answer["kv_bytes_per_token"] == 7 * (512 + 64) * 2
        parts = answer["layouts"]["recoverssm"]["state_parts"]
        assert parts["recurrent"] == {"shape": [8, 128, 128], "dtype": "float32", "bytes": 8 * 128 * 128 * 4}
        assert parts["conv"] == {"shape": [3 * 8 * 128, 3], "dtype": "bfloat16", "bytes": 3 * 8 * 128 * 3 * 2}
    assert answer == run_json(
        capsys, "--layers 20 --heads 32 --full-attention-layers 7 --kv-elements 576 --tensor-parallel 4 --drafts 3"
    )


def test_options_override_the_config(capsys, tmp_path):
    path = write(tmp_path / "c.json", KIMI_LINEAR | {"dtype": None, "torch_dtype": "float16"})
    answer = run_json(
        capsys, f"--config {path} --layers 5 --key-dim 64 --conv-width 2 --state-dtype bfloat16 --kv-dtype float8"
    )
    parts = answer["layouts"]["recoverssm"]["state_parts"]
    assert answer["num_layers"] == 5
    assert parts["recurrent"] == {"shape": [32, 64, 64], "dtype": "bfloat16", "bytes": 32 * 64 * 64 * 2}
    assert (parts["conv"]["shape"], parts["conv"]["dtype"]) == ([3 * 32 * 64, 1], "float16")
    assert answer["kv_bytes_per_token"] == 7 * 576


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_grouped_query_attention_in_the_config(capsys, tmp_path, ranks, heads):
    """Keys and values of a rank's heads; a rank has at least one."""
    config = KIMI_LINEAR | {"kv_lora_rank": None, "num_key_value_heads": 8}
    path = write(tmp_path / "c.json", config)
    answer = run_json(capsys, f"--config {path} --tensor-parallel {ranks}")
    assert answer["kv_bytes_per_token"] == 7 * 2 * heads * 72 * 2


def test_no_tokens_without_full_attention(capsys):
    shown = run(capsys, "--layers 3 --heads 4 --budget 1GiB")
    assert "no full attention layers given" in shown
    assert "KV cache" not in shown


def test_data_parallel_requests(capsys):
    """Requests are of all ranks, bytes of one."""
    answer = run_json(capsys, "--layers 69 --heads 96 --data-parallel 8 --requests 33 --budget 40GiB")
    one = run_json(capsys, "--layers 69 --heads 96 --requests 5 --budget 40GiB")
    assert answer["requests_per_rank"] == 5
    assert answer["freed_bytes"] == one["freed_bytes"]
    for name, layout in answer["layouts"].items():
        assert layout["requests_that_fit"] == 8 * one["layouts"][name]["requests_that_fit"]


def test_what_does_not_fit_is_said(capsys):
    rows = figures(run(capsys, f"{KIMI_K3} --requests 64 --budget 10GiB"))
    assert rows["KV cache tokens beside them"][0] == "requests do not fit"
    assert int(rows["KV cache tokens beside them"][1].replace(",", "")) > 0
    assert "needs 0.88 KiB more" in run(capsys, "--layers 1 --heads 1 --key-dim 64 --drafts 0")


@pytest.mark.parametrize(
    ("text", "wanted"), [("7", 7), ("1.5KiB", 1536), ("2 gb", 2 * 10**9), ("0.1GiB", 2**30 // 10), ("3B", 3)]
)
def test_sizes(text, wanted):
    assert plan.parse_bytes(text) == wanted


WRONG = {
    "nothing": ("", "--heads is missing: give it, or --config"),
    "no layers": ("--heads 4", "--layers is missing: give it, or --config"),
    "ranks": ("--layers 2 --heads 6 --tensor-parallel 4", "tensor_parallel should divide num_heads 6, but was 4"),
    "ranks below one": ("--layers 2 --heads 6 --tensor-parallel 0", "tensor_parallel should be at least 1, but was 0"),
    "negative drafts": ("--layers 2 --heads 6 --drafts -1", "--drafts should be at least 0, but was -1"),
    "no requests": ("--layers 2 --heads 6 --requests 0", "requests should be at least 1, but was 0"),
    "negative context": ("--layers 2 --heads 6 --context -5", "context should be at least 0, but was -5"),
    "budget zero": ("--layers 2 --heads 6 --budget 0", "budget should be at least 1, but was 0"),
    "budget unit": ("--layers 2 --heads 6 --budget 5x", "argument --budget: should be a size such as .* but was '5x'"),
    "half a cache": (
        "--layers 2 --heads 6 --kv-elements 6",
        "--full-attention-layers and --kv-elements should be given",
    ),
    "negative cache": (
        "--layers 2 --heads 6 --kv-elements -6 --full-attention-layers 1",
        "--kv-elements should be at least 0, but was -6",
    ),
    "context alone": ("--layers 2 --heads 6 --context 5", "context should be 0 for a model without full attention"),
    "key dim": ("--layers 2 --heads 6 --key-dim 0", "head_k_dim should be at least 1, but was 0"),
    "dtype": ("--layers 2 --heads 6 --dtype int8", "argument --dtype: invalid choice: 'int8'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        plan.main(shlex.split(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert re.match(f"recoverssm-plan: error: {message}", err.splitlines()[-1]), err


def without(*names):
    config = copy.deepcopy(KIMI_LINEAR)
    section = config
    for name in names[:-1]:
        section = section[name]
    del section[names[-1]]
    return config


def linear(**fields):
    return KIMI_LINEAR | {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | fields}


LINEAR = "linear_attn_config"
BAD_CONFIGS = {
    "not json": ("{", "not a JSON file (Expecting"),
    "empty": ("", "not a JSON file (Expecting value"),
    "endless number": ("1" * 5000, "not a JSON file (Exceeds the limit"),
    "deep": ("[" * 200_000, "not a JSON file"),
    "list": ([], "should hold a JSON object, but held list"),
    "another model": (
        {"model_type": "llama", "num_hidden_layers": 2},
        f"{LINEAR} should be an object, as in a Kimi-Linear config (model_type here: llama), but is missing",
    ),
    "nested another model": ({"text_config": {"model_type": "x"}}, f"text_config.{LINEAR} should be an object"),
    "null section": (KIMI_LINEAR | {LINEAR: None}, f"{LINEAR} should be an object, as in"),
    "no kda layers": (
        without(LINEAR, "kda_layers"),
        f"{LINEAR}.kda_layers should be a list of layer numbers, but is missing",
    ),
    "empty kda layers": (linear(kda_layers=[]), f"{LINEAR}.kda_layers should be a list of at least one layer"),
    "layers of words": (linear(kda_layers=["a"]), f"{LINEAR}.kda_layers should be a list of layer numbers, but was"),
    "layers of bools": (linear(kda_layers=[True]), f"{LINEAR}.kda_layers should be a list of layer numbers, but was"),
    "layer twice": (linear(kda_layers=[1, 1]), f"{LINEAR}.kda_layers should be a list of distinct layer numbers"),
    "more than all": (
        KIMI_LINEAR | {"num_hidden_layers": 5},
        "num_hidden_layers should be an integer of at least 20, but was 5",
    ),
    "lost layer": (
        linear(full_attn_layers=[4]),
        f"{LINEAR}.full_attn_layers should be the other 7 of num_hidden_layers 27",
    ),
    "in both": (
        linear(full_attn_layers=[1, 8, 12, 16, 20, 24, 27]),
        f"{LINEAR}.full_attn_layers should be the other 7 of num_hidden_layers 27",
    ),
    "no heads": (
        without(LINEAR, "num_heads"),
        f"{LINEAR}.num_heads should be an integer of at least 1, but is missing",
    ),
    "head dim text": (linear(head_dim="128"), f'{LINEAR}.head_dim should be an integer of at least 1, but was "128"'),
    "conv zero": (
        linear(short_conv_kernel_size=0),
        f"{LINEAR}.short_conv_kernel_size should be an integer of at least 1",
    ),
    "layers missing": (
        without("num_hidden_layers"),
        "num_hidden_layers should be an integer of at least 20, but is missing",
    ),
    "latent": (KIMI_LINEAR | {"kv_lora_rank": -1}, "kv_lora_rank should be an integer of at least 1, but was -1"),
    "dtype": (KIMI_LINEAR | {"dtype": "int8"}, "dtype should be one of float32, bfloat16, float16, but was"),
    "dtype list": (KIMI_LINEAR | {"dtype": ["bfloat16"]}, "dtype should be one of float32, bfloat16, float16, but was"),
}


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_wrong_configs(capsys, tmp_path, config, message):
    """One line that names the file, the field, what it should be and what it was."""
    path = write(tmp_path / "c.json", config)
    with pytest.raises(SystemExit) as stopped:
        plan.main(["--config", str(path)])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"recoverssm-plan: error: {path}: {message}"), err


def test_config_that_cannot_be_read(capsys, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, message in {
        tmp_path / "nothing": "No such file or directory; give a Hugging Face config.json or its directory",
        tmp_path: "No such file or directory",
        tmp_path / "binary": "not a JSON file ('utf-8' codec can't decode",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            plan.main(["--config", str(path)])
        assert stopped.value.code == 2
        assert f": {message}" in capsys.readouterr().err


def test_heads_of_grouped_query_attention_that_do_not_divide(capsys, tmp_path):
    path = write(tmp_path / "c.json", KIMI_LINEAR | {"kv_lora_rank": None, "num_key_value_heads": 12})
    with pytest.raises(SystemExit):
        plan.main(["--config", str(path), "--tensor-parallel", "8"])
    assert (
        "tensor_parallel should divide num_key_value_heads 12 or be a multiple of it, but was 8"
        in capsys.readouterr().err
    )

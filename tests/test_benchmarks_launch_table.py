"""The sweep of launch configurations: candidates, what they compile to, and the table, with made-up times."""

import itertools
import json
import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from benchmarks import launch_sweep, launch_table
from benchmarks.launch_sweep import candidates, configured, fewest_rows, figures, launched
from benchmarks.launch_table import Trial, mean_loss, table_of
from benchmarks.shapes import DTYPES, Shape
from recoverssm_ops.triton import configs, launch

SMALL = Shape(4, 2, 2, "fp32", head_size=16, dtype="fp32")
SCALAR = Shape(64, 16, 16, "bf16", value_heads=32, gate="unbounded", scalar_gate=True)


def test_the_nearest_candidates_come_first():
    own = {"num_warps": 2, "BV": 32, "STAGES": 2, "BK": 128}
    found = candidates(own, 64)
    assert found[0] == {"num_warps": 2, "BV": 32, "STAGES": 2}
    assert {c["BV"] for c in found} == {16, 32, 64} and {c["num_warps"] for c in found} == {1, 2, 4, 8}
    assert len(found) == 4 * 3 * 3 and found[-1]["num_warps"] == 8
    assert {c["BV"] for c in candidates(own, 64, {"BV": (32,)})} == {32}


@pytest.mark.parametrize("shape", (SMALL, SCALAR), ids=str)
@pytest.mark.parametrize("operation", launch_sweep.FUNCTIONS)
def test_a_changed_configuration_reaches_the_launch(operation, shape):
    noted, question, own = launched(shape, operation, {})
    changed, _, again = launched(shape, operation, {"num_warps": 2 * own["num_warps"]})
    assert noted.keywords["num_warps"] == own["num_warps"] == again["num_warps"]
    assert changed.keywords["num_warps"] == 2 * own["num_warps"]
    assert question.split("(")[0] in launch_sweep.FUNCTIONS[operation] and own.items() <= noted.keywords.items()


@pytest.mark.parametrize("head_size", (64, 96, 128, 256))
@pytest.mark.parametrize("pool", ("bf16", "fp32", "fp16"))
def test_fewer_rows_are_launched_as_all_are(pool, head_size):
    """Sweeps compile a shape's kernel for the fewest rows that get the same choices."""
    names = ("verify_config", "verify_async_config", "commit_config", "commit_rows_config")
    for heads, batch in itertools.product((1, 3, 12, 32), (*range(1, 70), 133, 529, 793, 2000)):
        shape = Shape(batch, heads, 8, pool, head_size)
        fewest = fewest_rows(shape)
        assert 1 <= fewest <= batch
        sizes = (8, head_size, head_size, DTYPES[pool])
        for choose in (getattr(configs, name) for name in names):
            assert choose(fewest * heads, *sizes) == choose(batch * heads, *sizes), (shape, fewest)


def test_the_launcher_is_itself_again():
    before = launch.verify_config
    with configured("verify", {"num_warps": 1}):
        assert launch.verify_config is not before
    assert launch.verify_config is before


def test_a_candidate_that_cannot_compile_says_so():
    assert figures((SMALL, "verify", {}, 90)).registers > 0
    failed = figures((SMALL, "commit", {"BV": 3}, 90))
    assert failed.failure and failed.registers == 0


def trial(question: str, times: dict[int, float]) -> Trial:
    changes = [{"num_warps": n} for n in (1, 2, 4)]
    return Trial(SMALL, "verify", question, changes[0], changes, microseconds=times)


def test_the_table_has_the_least_loss_over_the_shapes_that_ask():
    trials = [
        trial("a", {0: 10.0, 1: 11.0, 2: 20.0}),
        trial("a", {0: 40.0, 1: 11.0, 2: 10.0}),
        trial("b", {2: 5.0}),
        trial("never timed", {}),
    ]
    assert table_of(trials) == {"a": {"num_warps": 2}, "b": {"num_warps": 4}}
    assert trials[0].loss({"num_warps": 2}) == pytest.approx(0.1)
    assert trials[2].loss({"num_warps": 1}) is None
    assert mean_loss([0.1, 0.1]) == pytest.approx(0.1)


def test_the_command_finds_the_fastest(tmp_path, monkeypatch, capsys):
    """Times are made up, twice as good with two warps; what is compiled is real."""

    class Timer:
        def __init__(self, shape, operation, accepted, sets, device):
            assert accepted == 1

        def microseconds(self, changes, samples):
            return [10.0 if change["num_warps"] == 2 else 20.0 for change in changes]

    monkeypatch.setattr(launch_table, "Timer", Timer)
    path = tmp_path / "launch.json"
    sizes = ["--batch", "4", "8", "--heads", "2", "--window", "2", "--head-size", "16", "--state-dtype", "fp32"]
    knobs = ["--knob", "num_warps=1,2", "BV=16", "STAGES=1", "num_stages=1"]
    options = [*sizes, *knobs, "--op", "commit", "--device", "cpu", "--jobs", "1", "--seconds", "120"]
    assert launch_table.main([*options, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [t["shape"]["batch"] for t in document["trials"]] == [4, 8]
    (config,) = document["table"].values()
    assert config["num_warps"] == 2 and document["table_loss"] == pytest.approx(0)
    for t in document["trials"]:
        own = t["own"]["num_warps"]
        assert t["own_loss"] == pytest.approx(0 if own == 2 else 1)
        assert t["timed"][0]["us"] == 10.0 and t["timed"][0]["registers"] > 0
    assert launch_table.main([*options, "--table", str(path)]) == 0
    assert "the table 0.0%" in capsys.readouterr().out


def test_a_table_that_is_missing_is_refused_before_anything_is_timed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        launch_table.parse_arguments(["--device", "cpu", "--table", str(tmp_path / "none.json")])
    assert "--table should be the JSON of an earlier run, but there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("operation", launch_sweep.FUNCTIONS)
def test_candidates_are_timed_until_the_deadline(operation):
    """On the CPU, where the operators do not ask for a configuration: what is timed is the same call for each."""
    trial = Trial.of(SMALL, operation, {"num_warps": (1, 2), "BV": (16,), "STAGES": (1,), "num_stages": (1,)})
    for at in range(len(trial.changes)):
        trial.figures[at] = launch_sweep.Figures(registers=32, spilled_bytes=8 if at == 1 else 0)
    launch_table.time_trial(trial, "cpu", float("inf"))
    assert [*trial.microseconds] == [at for at in range(len(trial.changes)) if at != 1]
    assert all(us > 0 for us in trial.microseconds.values())
    assert trial.as_json()["timed"][0]["us"] == min(trial.microseconds.values())
    trial.microseconds.clear()
    launch_table.time_trial(trial, "cpu", 0.0)
    assert [*trial.microseconds] == [0]


@pytest.mark.parametrize(
    ("operation", "changed"),
    (
        ("verify", {"num_warps": 8}),
        ("verify", {"BUFFERS": 4}),
        ("verify", {"AHEAD": 4}),
        ("verify", {"SHARE": 48}),
        ("commit", {"PART": 128}),
        ("commit", {"PART": 32, "ROWS": 16, "num_warps": 4}),
        ("commit", {"PART": 24, "ROWS": 4}),
    ),
    ids=str,
)
def test_a_configuration_that_leaves_rows_out_or_reads_past_them_is_a_failure(operation, changed):
    """Without its work a kernel would be the fastest."""
    assert figures((Shape(64, 12, 4, "bf16", 64), operation, changed, 90)).failure

"""The trial of the fused kernel: commit and verify in one launch, against the oracle; its command, with made-up times.

Triton's interpreter is chosen by an environment variable when Triton is first imported, so what runs the kernel on the CPU is
in a process of its own.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from budget import assert_within_budget, verify_slack

pytest.importorskip("triton")

from benchmarks import fused, fused_compile, fused_trial
from benchmarks.fused_kernel import fused_verify
from benchmarks.fused_trial import FUSED, MERGED, SEPARATE, WAYS, FusedTrial, Sweep
from benchmarks.inputs import Inputs
from benchmarks.launch_sweep import Figures
from benchmarks.shapes import Shape
from recoverssm_ops.reference import recurrence

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ONE_CONFIG = ("--block-v", "16", "--warps", "1", "--stages", "1")
TINY = ("--device", "cpu", "--batch", "1", "--heads", "1", "--head-size", "16", "--window", "2", "--accepted", "1",
        "--dtype", "fp32", "--state-dtype", "fp32", "--samples", "2", "--sets", "1", *ONE_CONFIG)  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def oracle(window: Inputs, row: int, state: torch.Tensor, dtype: torch.dtype) -> tuple:
    data = (x[0][row].cpu() for x in (window.q, window.k, window.v, window.g, window.beta))
    return recurrence(
        *data, state.cpu(), A_log=window.A_log.cpu(), dt_bias=window.dt_bias.cpu(), scale=window.scale,
        lower_bound=window.shape.lower_bound, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, dtype=dtype,
    )  # fmt: skip


def check_launch(shape: Shape, device: str, config: dict[str, int]) -> None:
    """Rows with none, some, all and more than all tokens accepted, and a row of padding over a null slot of NaN."""
    trial = FusedTrial(shape, 1, 1, device)
    window, previous, T = trial.window, trial.previous, shape.window
    pool, lengths, padding = window.states[0], [0, T, 2, T + 3, 3, -1], 4
    window.slots[padding] = 0
    pool[0] = float("nan")
    pool[window.slots[0].item(), 0, 0, :2] = -0.0  # what arithmetic would not keep
    before, slots = pool.clone(), window.slots.tolist()
    accepted = torch.tensor(lengths, device=device)
    record = (trial.committing.u[0], previous.k[0], previous.g[0])
    o, u = fused_verify(window, 0, *record, accepted, config)
    double, single = torch.float64, torch.float32
    for row, slot in enumerate(slots):
        if row == padding:
            assert o[row].count_nonzero() == 0 and u[row].count_nonzero() == 0
            continue
        n = max(0, min(lengths[row], T))
        committed, old = pool[slot], before[slot]
        if n:
            truth, low = (oracle(previous, row, old, dtype)[2][n] for dtype in (double, single))
            assert_within_budget(committed.cpu(), truth, low, name=f"state of row {row}")
        else:
            assert torch.equal(bits(committed), bits(old)), f"row {row}: nothing accepted, yet the slot changed"
        truth, low = (oracle(window, row, committed, dtype) for dtype in (double, single))
        for name, actual, at in (("o", o, 0), ("u", u, 1)):
            slack = verify_slack(pool)
            assert_within_budget(actual[row].cpu(), truth[at], low[at], name=f"{name} of row {row}", slack=slack)
    others = [slot for slot in range(pool.shape[0]) if slot not in slots or slot == 0]
    assert torch.equal(bits(pool[others]), bits(before[others]))


if INTERPRETED:

    @pytest.mark.parametrize(
        ("shape", "part"),
        [
            (Shape(6, 1, 4, "fp32", 24, 2, dtype="fp32"), 16),
            (Shape(6, 1, 4, "fp16", 24, 2, "unbounded", dtype="fp16"), 32),
        ],
        ids=("parts", "tiles"),
    )
    def test_parity(shape, part):
        check_launch(shape, "cpu", {"BV": 16, "PART": part, "STAGES": 2, "num_warps": 1})

    def test_the_command_times_and_checks(tmp_path, capsys):
        path = tmp_path / "fused.json"
        assert fused.main([*TINY, "--json", str(path)]) == 0
        (row,) = json.loads(path.read_text())["rows"]
        assert [*row["ways"]] == [*WAYS] and (row["batch"], row["accepted"], row["config"]["BV"]) == (1, 1, 16)
        floors = {name: way["floor_us"] for name, way in row["ways"].items()}
        assert floors[FUSED] < floors[SEPARATE] == floors[MERGED]
        for way in (SEPARATE, FUSED):
            assert all(0 < error < 1e-6 for error in row["errors"][way].values())
        assert "fp32 pool, H 1: B 1" in capsys.readouterr().out

    def test_wrong_results_are_not_timed(monkeypatch, capsys):
        def off_by_a_percent(*arguments):
            o, u = fused_verify(*arguments)
            return o, 1.01 * u

        monkeypatch.setattr(fused_trial, "fused_verify", off_by_a_percent)
        assert fused.main([*TINY]) == 1
        shown = capsys.readouterr().out
        assert "wrong: u differs from the separate kernels' by 1.0e-02" in shown and "B 1 not measured" in shown

else:

    def test_interpreted():
        """Run the tests above in a process that interprets kernels."""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        run = subprocess.run(
            [*command, "-k", "parity or command or wrong"], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        assert int(re.search(r"(\d+) passed", run.stdout).group(1)) == 4, run.stdout

    @pytest.mark.cuda
    @pytest.mark.parametrize("pool", ["bf16", "fp32"])
    @pytest.mark.parametrize(
        "config", [(16, 128, 2, 1), (32, 128, 3, 2), (64, 128, 2, 4), (128, 128, 1, 8), (16, 16, 1, 4)], ids=str
    )
    def test_parity_on_a_gpu(pool, config):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        rows, part, stages, warps = config
        check_launch(Shape(6, 2, 8, pool), "cuda", {"BV": rows, "PART": part, "STAGES": stages, "num_warps": warps})

    def test_what_is_compiled_is_what_is_launched():
        small = Shape(64, 2, 4, "bf16", 32)
        configs = {
            MERGED: {},
            FUSED: {"BV": 16, "PART": 32, "STAGES": 2, "num_warps": 2},
        }
        for kernel, config in configs.items():
            noted = fused_compile.noted_launch(fused_compile.task(kernel, small, config, 90, layers=7))
            assert noted.keywords.items() >= config.items()
            assert noted.kernel.__name__ == {MERGED: "commit_layers_rows_kernel", FUSED: "fused_kernel"}[kernel]
        kernels = [task.kernel for task in fused_compile.library_tasks(small, 7, 90)]
        assert kernels == ["verify", "commit", MERGED]
        figures = fused_compile.compiled(fused_compile.task(FUSED, small, configs[FUSED], 90))
        assert figures.registers > 0 and figures.spilled_bytes == 0 and figures.failure == ""
        assert fused_compile.compiled(fused_compile.task(FUSED, small, {"BV": 3, "PART": 3}, 90)).failure

    def test_kernels_on_the_cpu_are_refused_unless_interpreted(capsys):
        with pytest.raises(SystemExit):
            fused.parse_arguments(["--device", "cpu"])
        assert "TRITON_INTERPRET=1" in capsys.readouterr().err


def arguments_of(monkeypatch, *options: str):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return fused.parse_arguments(["--device", "cpu", *options])


def test_shapes_and_candidates(monkeypatch):
    arguments = arguments_of(monkeypatch)
    shapes = fused.shapes_of(arguments)
    assert {(s.state_dtype, s.heads, s.batch) for s in shapes} == {
        (pool, heads, batch) for pool in ("bf16", "fp32") for heads in (12, 32) for batch in (1, 8, 64)
    }
    assert all((s.window, s.head_size, s.gate) == (8, 128, "bounded") for s in shapes) and arguments.accepted == 4
    configs = fused.candidates(arguments)
    assert all(4 <= c["BV"] / c["num_warps"] <= 32 for c in configs) and {c["STAGES"] for c in configs} == {1, 2, 3}
    assert {c["PART"] for c in configs if c["BV"] == 32} == {32, 128}
    assert {c["STAGES"] for c in configs if c["BV"] == c["PART"]} == {1}, "a loop of one tile has nothing to overlap"
    assert len({tuple(c.items()) for c in configs}) == len(configs)
    with pytest.raises(SystemExit):
        arguments_of(monkeypatch, "--accepted", "9")


def test_the_verdict_names_what_is_faster():
    def row(batch, **microseconds):
        return {
            "state_dtype": "bf16",
            "heads": 12,
            "batch": batch,
            "ways": {n: {"us": t} for n, t in microseconds.items()},
        }

    rows = [
        row(1, separate=8.0, merged=5.0, fused=6.0),
        row(8, separate=8.0, merged=8.0, fused=6.0),
        row(64, separate=9.0),
    ]
    assert fused.verdict(rows) == ["bf16 pool, H 12: B 1 loses to merged; B 8 wins; B 64 not measured"]


def test_failures_and_spills_in_a_sweep():
    sweep = Sweep([{"BV": 16}, {"BV": 32}, {"BV": 64}, {"BV": 128}])
    sweep.figures = {0: Figures(255, 64), 1: Figures(200), 2: Figures(failure="no memory"), 3: Figures(255, 30000)}
    assert sweep.runnable() == [1, 0]
    sweep.microseconds[1] = 2.0
    sweep.fail(1, "wrong")
    assert sweep.runnable() == [0] and sweep.microseconds == {}
    assert [entry["failure"] for entry in sweep.as_json()] == ["", "wrong", "no memory", ""]

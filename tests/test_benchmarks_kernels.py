"""The kernel benchmark on the CPU, with shapes as small as they come: it runs, counts its bytes and sees errors."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from benchmarks import kernels
from benchmarks.floors import commit_bytes, materialised_bytes, verify_bytes
from benchmarks.inputs import Inputs
from benchmarks.kernel_timing import interleaved
from benchmarks.providers import OURS, RecoverSSM
from benchmarks.shapes import Shape, layers, targets

TINY = ["--device", "cpu", "--batch", "2", "--heads", "2", "--head-size", "8", "--samples", "2", "--sets", "2"]


def run(tmp_path, *options: str) -> dict:
    path = tmp_path / "kernels.json"
    assert kernels.main([*TINY, "--json", str(path), *options]) == 0
    return json.loads(path.read_text())


def by_operation(rows: list[dict], provider: str) -> dict[tuple, dict]:
    return {(row["operation"], row["accepted"]): row for row in rows if row["provider"] == provider and "us" in row}


def test_every_operation_is_timed_and_checked(tmp_path, capsys):
    names = ["recoverssm", "recoverssm-merged", "portable"]
    document = run(tmp_path, "--window", "4", "--state-dtype", "fp32", "--dtype", "fp32", "--providers", *names)
    rows = by_operation(document["rows"], "recoverssm")
    assert [*rows] == [("verify", None), ("commit", 1), ("commit", 2), ("commit", 4), ("step", 2)]
    assert [*by_operation(document["rows"], "recoverssm-merged")] == [("step", 2)]
    for name in names:
        for row in by_operation(document["rows"], name).values():
            assert 0 < row["us_quartiles"][0] <= row["us"] <= row["us_quartiles"][1]
            assert 0 < row["error_o"] < 1e-6 and 0 < row["error_u"] < 1e-6
            assert row["operation"] == "verify" or 0 < row["error_state"] < 1e-6
            assert row["times_floor"] == pytest.approx(row["us"] / row["floor_us"])
    shown = capsys.readouterr().out
    assert "fp32 pool, B 2, H 2, T 4, D 8" in shown and "commit, 4 accepted" in shown


@pytest.mark.parametrize(
    "options", [("--gate", "unbounded"), ("--scalar-gate", "--value-heads", "4")], ids=lambda o: o[0]
)
def test_the_plain_path_computes_the_same(tmp_path, options):
    """Eager, which is the same function: Inductor takes its time."""
    with torch.compiler.set_stance("force_eager"):
        document = run(
            tmp_path, "--window", "3", "--providers", "plain", "recoverssm", "--state-dtype", "fp32", *options
        )
    for name in ("plain", "recoverssm"):
        for row in by_operation(document["rows"], name).values():
            assert row["error_o"] < 4e-3 and (row["operation"] == "verify" or row["error_state"] < 1e-6)


def test_an_error_is_seen(tmp_path, monkeypatch):
    verify = RecoverSSM.verify

    def off_by_a_percent(self, i):
        verify(self, i)
        self.o[i] *= 1.01

    monkeypatch.setattr(RecoverSSM, "verify", off_by_a_percent)
    document = run(tmp_path, "--window", "2", "--op", "verify", "--providers", "recoverssm")
    assert 0.009 < document["rows"][0]["error_o"] < 0.013


def test_a_provider_that_fails_is_said_to(tmp_path, monkeypatch, capsys):
    def broken(self, i):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(RecoverSSM, "commit", broken)
    assert kernels.main([*TINY, "--window", "2", "--providers", "recoverssm", "portable"]) == 1
    shown = capsys.readouterr().out
    assert "recoverssm: failed: RuntimeError: no such kernel" in shown and "│ portable" in shown


def test_a_run_that_is_stopped_shows_and_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    path, measure = tmp_path / "kernels.json", kernels.measure

    def stopped(shape, *rest):
        if shape.window == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(shape, *rest)

    monkeypatch.setattr(kernels, "measure", stopped)
    options = ["--window", "2", "3", "4", "--op", "verify", "--providers", "recoverssm", "--json", str(path)]
    assert kernels.main([*TINY, *options]) == 130
    assert [row["window"] for row in json.loads(path.read_text())["rows"]] == [2]
    shown = capsys.readouterr().out
    assert "T 2, D 8" in shown and "s, interrupted" in shown


def test_processes_that_compile_end_with_the_run(tmp_path, monkeypatch):
    """They are real ones, which would go on for a minute; the run is stopped while it waits for them."""
    started, popen = [], subprocess.Popen

    def start(command, **options):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        if len(started) == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert kernels.main([*TINY, "--jobs", "2"]) == 130
    assert [process.wait(30) for process in started] == [-signal.SIGTERM] * 2


def test_absent_peers_are_named_with_what_to_do(tmp_path, capsys):
    document = run(tmp_path, "--op", "verify", "--peers", str(tmp_path / "none"), "--providers", "vllm", "flashinfer")
    assert {*document["absent"]} == {"vllm", "flashinfer"}
    assert "python -m benchmarks.peers" in capsys.readouterr().out


def test_bytes_that_must_move():
    """Counted by hand: 2 rows, 3 tokens, 1 key and 2 value heads of 4, a bf16 pool, bf16 inputs."""
    shape = Shape(2, 1, 3, "bf16", head_size=4, value_heads=2)
    states = 2 * 2 * 4 * 4 * 2
    # q, k: 4 elements; v, o: 8; g: 8; beta: 2, of two bytes each; u: 8 of four.
    token = 2 * (4 + 4 + 8 + 8 + 8 + 2) + 32
    assert verify_bytes(shape) == states + 2 * 3 * token
    assert commit_bytes(shape, 2) == 2 * states + 2 * 2 * (32 + 2 * (4 + 8))
    assert materialised_bytes(shape) == 4 * states + 2 * 3 * (token - 32)


def test_variants_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timings = interleaved(calls, 2, 3, "cpu")
    assert order == ["a", "b"] * 5 and {*timings} == {"a", "b"}


def test_commits_of_all_lengths_come_from_one_record():
    """A captured graph reads the lengths on the device: nothing of the provider may depend on them."""
    inputs = Inputs(Shape(2, 1, 3, "fp32", head_size=8, dtype="fp32"), 1, "cpu")
    provider = OURS["recoverssm"](inputs)
    provider.verify(0)
    _, _, states = inputs.oracle()
    for n in (3, 1, 2):
        provider.reset()
        inputs.accepted.fill_(n)
        provider.commit(0)
        torch.testing.assert_close(inputs.checked_states(provider.committed()), states[:, n], rtol=1e-5, atol=1e-6)


def test_presets_name_what_the_targets_need():
    shapes = targets()
    assert len({*shapes}) == len(shapes)
    assert {s.window for s in shapes} == {1, 2, 4, 8, 16} and {s.head_size for s in shapes} == {64, 96, 128, 192, 256}
    assert {(s.batch, s.heads) for s in shapes} >= {(64, 12), (256, 12), (64, 32), (1, 12)}
    assert {s.value_heads for s in shapes if s.scalar_gate} == {32, 64}
    assert all((s.batch, s.heads, s.window) == (32, 12, 8) for s in layers())

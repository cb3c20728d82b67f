"""``python -m benchmarks.runtimes``: a tiny run on the CPU, and what is reported where a way fails or takes too long."""

import json
import shutil

import pytest
import torch
from exporting import convolutions_replaced
from graphs import FakeRecorder
from test_benchmarks_step import TINY

from benchmarks import runtime_ways, runtimes
from benchmarks.runtime_ways import COMPILED, EAGER, KERNELS, PORTABLE, Way
from models.captured_step import CapturedStep
from recoverssm_ops import tensorrt

RUN = ["--preset", "tiny", "--batch", "2", "--drafts", "2", "--samples", "2", "--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    # argparse checks the preset's name against the same dictionary.
    monkeypatch.setitem(runtimes.PRESETS, "tiny", TINY)


@pytest.mark.parametrize(
    "ways", [[EAGER], pytest.param([EAGER, COMPILED, PORTABLE], marks=pytest.mark.exhaustive)], ids=["eager", "all"]
)
def test_ways_are_measured_side_by_side(ways, tmp_path, capsys):
    if PORTABLE in ways and shutil.which("g++") is None:
        pytest.skip("AOTInductor compiles C++, and g++ is not installed")
    path = tmp_path / "figures.json"
    assert runtimes.main([*RUN, "--ways", *ways, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [(row["way"], row["launch"]) for row in result["figures"]] == [(way, "launched") for way in ways]
    for row in result["figures"]:
        low, high = row["us_quartiles"]
        assert 0 < low <= row["us"] <= high and row["peak_bytes"] > 0
        assert row["tokens_equal"] and row["state_difference"] < 1e-5
    assert runtime_ways.WAYS[ways[-1]] in capsys.readouterr().out


def two_ways(setting, model, batch):
    """The model as it is, and one that fails."""
    step = setting.step(model, batch)

    def broken(*inputs):
        raise RuntimeError("no such engine")

    return {EAGER: Way(EAGER, step, dict(step.pools.named_buffers(prefix="pools"))), KERNELS: Way(KERNELS, broken, {})}


def test_captured_ways_and_failures_are_reported_beside_the_others(monkeypatch, tmp_path, capsys):
    """With a recorder that stands in for a GPU's."""
    monkeypatch.setattr(runtimes, "CapturedStep", lambda call: CapturedStep(call, recorder=FakeRecorder()))
    monkeypatch.setattr(runtimes, "prepare", lambda setting, model, *_: two_ways(setting, model, 2))
    monkeypatch.setattr(runtimes, "captures", lambda device: True)
    path = tmp_path / "figures.json"
    assert runtimes.main([*RUN, "--ways", EAGER, "--layers", "2", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["figures"]
    assert [(row["way"], row["launch"]) for row in rows] == [
        (EAGER, "launched"),
        (EAGER, "captured"),
        (KERNELS, "launched"),
    ]
    assert rows[1]["graph_bytes"] == 2048 and rows[2]["failed"] == "RuntimeError: no such engine"
    shown = capsys.readouterr().out
    assert "tiny, 2 layers" in shown and "aoti-triton, launched: RuntimeError: no such engine" in shown


@torch.no_grad()
@pytest.mark.parametrize("convolutions", [False, True])
def test_a_verify_engine_and_the_commit_in_pytorch_are_one_step(monkeypatch, convolutions):
    """What would be an engine runs as the program that TensorRT would convert; convolutions are replaced on CUDA."""
    monkeypatch.setattr(tensorrt, "compile", lambda program, inputs: tensorrt.lower(program).module())
    setting = runtimes.Setting(TINY, 2, "fp32", "fp32", "cpu", None)
    model, inputs = setting.model(), setting.inputs(2)
    step = setting.step(model, 2)
    with convolutions_replaced(convolutions):
        way = runtime_ways.tensorrt(setting, model, 2)
    expected, (results, pools) = step(*inputs), runtimes.first_step(way, inputs, "cpu")
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert runtimes.difference(pools, dict(step.pools.named_buffers(prefix="pools"))) < 1e-5


def test_a_state_that_differs_is_seen():
    pools = {"pools.recurrent_0": torch.tensor([1.0, -4.0]), "pools.conv_0": torch.tensor([0.0])}
    other = {"pools.recurrent_0": torch.tensor([1.0, -3.0]), "pools.conv_0": torch.tensor([9.0])}
    assert runtimes.difference(other, pools) == 0.25 and runtimes.difference(pools, pools) == 0


def test_who_takes_too_long_is_ended(tmp_path):
    setting = runtimes.Setting(TINY, 2, "fp32", "fp32", "cpu", None)
    with runtime_ways.preparing([COMPILED], setting, 2, tmp_path, patience=0.0) as results:
        assert list(results()) == [(COMPILED, {"failed": "not compiled within 0 s"})]


def test_ways_that_this_machine_lacks_are_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        runtimes.parse_arguments(["--device", "cpu", "--ways", KERNELS])
    assert exit_.value.code == 2
    assert "--ways aoti-triton: not on this machine" in capsys.readouterr().err

"""``python -m benchmarks.step``: a tiny run, its figures, forced acceptance, compilation in other processes."""

import argparse
import dataclasses
import json

import pytest
import torch
from graphs import FakeRecorder
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

from benchmarks import step, step_ways
from models.captured_step import CapturedStep
from models.config import KDAConfig
from models.speculation import SpeculativeStep

TINY = KDAConfig(
    vocab_size=13, hidden_size=12, num_layers=1, full_attn_period=0, num_heads=2, head_k_dim=4, head_v_dim=6,
    gate_rank=4, intermediate_size=8,
)  # fmt: skip
WAYS = (step_ways.UNTOUCHED, step_ways.REWRITTEN, step_ways.MERGED)
RUN = ["--preset", "tiny", "--drafts", "2", "--samples", "2", "--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    # argparse checks the preset's name against the same dictionary.
    monkeypatch.setitem(step.PRESETS, "tiny", TINY)


def setting(accepted=None, drafts=7):
    return step_ways.Setting(TINY, drafts, "fp32", "fp32", "cpu", accepted)


def test_all_ways_of_every_batch_are_measured(tmp_path, capsys):
    path = tmp_path / "figures.json"
    step.main([*RUN, "--batch", "2", "3", "--accepted", "2", "--jobs", "0", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["layers"] == {"rewritten": 1, "refused": 0}
    ways = ["untouched", "rewritten"]
    assert [(f["batch"], f["way"]) for f in result["figures"]] == [(b, way) for b in (2, 3) for way in ways]
    for f in result["figures"]:
        low, high = f["quartiles_ms"]
        assert 0 < low <= f["step_ms"] <= high and f["peak_bytes"] > 0
        assert f["accepted_mean"] == 2 and f["launch"] == "launched"
        assert f["tokens_per_second"] == pytest.approx(1e3 * 2 * f["batch"] / f["step_ms"])
    assert result["settings"]["accepted"] == 2 and result["wall_s"] > 0
    assert "layers 1 rewritten, 0 refused" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
def test_ways_are_what_they_say(way):
    s = step_ways.Setting(dataclasses.replace(TINY, num_layers=2), 1, "fp32", "fp32", "cpu", None)
    with torch.no_grad():
        compiled = step_ways.compile_step(way, s.step(s.model(), 2))
        _, (code,) = run_and_get_code(compiled, *s.inputs(2))
    calls = {name: code.count(f"torch.ops.recoverssm.{name}.default(") for name in ("kda_commit", "kda_commit_layers")}
    expected = {step_ways.UNTOUCHED: (0, 0), step_ways.REWRITTEN: (2, 0), step_ways.MERGED: (0, 1)}
    assert tuple(calls.values()) == expected[way]


def test_merged_commits_are_a_way_of_their_own(monkeypatch, tmp_path):
    prepared = []

    def prepare(setting, model, way, batch):
        prepared.append((way, batch))
        return step_ways.Prepared(way, batch, lambda *inputs: torch.zeros(1000), (), 1.0)

    monkeypatch.setattr(step, "prepare", prepare)
    step.main([*RUN, "--batch", "2", "2", "1", "--merge-layers", "--jobs", "1"])
    assert prepared == [(way, batch) for batch in (2, 1) for way in WAYS]


def test_captured_steps_are_measured_beside_launched_ones(monkeypatch):
    """With a recorder that stands in for a GPU's."""
    monkeypatch.setattr(step, "CapturedStep", lambda function: CapturedStep(function, recorder=FakeRecorder()))
    s = setting(3.0, drafts=4)
    model, figures = s.model(), []
    arguments = argparse.Namespace(device="cpu", cudagraphs=True, samples=3)
    with torch.no_grad():
        for batch in (1, 2):
            ways = [step_ways.Prepared(way, batch, s.step(model, batch), s.inputs(batch), 0.5) for way in WAYS[:2]]
            figures += step.measure(ways, s, arguments)
    keys = [(f["batch"], f["way"], f["launch"]) for f in figures]
    assert keys == [(b, way, launch) for b in (1, 2) for way in WAYS[:2] for launch in (step.LAUNCHED, step.CAPTURED)]
    assert [f.get("graph_bytes") for f in figures] == [None, 2048] * 4
    assert all(f["accepted_mean"] == 3 and f["step_ms"] > 0 for f in figures)
    table = step.report(figures, s, "")
    assert table.row_count == 8
    # Each is compared with the untouched step of its own kind.
    speeds = list(table.columns[4].cells)
    assert speeds[0] == speeds[1] == speeds[4] == speeds[5] == "1.00"
    assert speeds[3] == f"{figures[1]['step_ms'] / figures[3]['step_ms']:.2f}"


@pytest.mark.slow
def test_other_processes_leave_their_compilations_in_the_caches():
    """What this process then does is tracing: Inductor and AOTAutograd find their results."""
    s = setting(drafts=1)
    with fresh_cache():
        configurations = [(step_ways.UNTOUCHED, 2), (step_ways.REWRITTEN, 2)]
        done = dict(step_ways.in_parallel(s, configurations, jobs=2, threads=1))
        assert done.pop(None) == {"rewritten": 1, "refused": 0}
        assert done.keys() == set(configurations) and min(done.values()) > 0
        model = s.model()
        for way, batch in configurations:
            torch.compiler.reset()
            counters.clear()
            step_ways.prepare(s, model, way, batch)
            assert counters["aot_autograd"]["autograd_cache_hit"] == 1, way
            assert counters["aot_autograd"]["autograd_cache_miss"] == 0, way


@pytest.mark.parametrize("drafts", [0, 1, 7])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_accepted_lengths_have_the_wanted_mean(drafts, batch):
    for accepted in {1.0, 1 + drafts / 3, 1 + drafts / 2, 1.0 + drafts}:
        lengths = setting(accepted, drafts).accepted_lengths(batch)
        assert lengths.shape == (batch,) and lengths.min() >= 1 and lengths.max() <= 1 + drafts
        assert int(lengths.sum()) == round(accepted * batch)
    lengths = setting(None, drafts).accepted_lengths(batch)
    assert lengths.min() >= 1 and lengths.max() <= 1 + drafts
    if batch == 32:
        assert len(set(lengths.tolist())) == 1 + drafts


@torch.no_grad()
def test_the_step_accepts_what_it_is_forced_to():
    s = setting(3.0)
    _, num_accepted = s.step(s.model(), 5)(*s.inputs(5))
    assert num_accepted.tolist() == s.accepted_lengths(5).tolist()
    assert len(set(num_accepted.tolist())) > 1


def test_pools_are_as_large_as_the_batch():
    made = setting().step(setting().model(), 5)
    assert isinstance(made, SpeculativeStep)
    assert {buffer.shape[0] for buffer in made.pools.buffers()} == {5}
    assert setting().state_bytes(5) == made.pools.of("recurrent", 0).nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch should be at least 1, got 0"),
        (["--samples", "1"], "--samples should be at least 2, got 1"),
        (["--drafts", "-1"], "--drafts should be at least 0, got -1"),
        (["--accepted", "0.5"], "--accepted should be in 1..8, 1 + drafts, got 0.5"),
        (["--accepted", "9"], "--accepted should be in 1..8, 1 + drafts, got 9.0"),
        (["--accepted", "nan"], "--accepted should be in 1..8, 1 + drafts, got nan"),
        (["--device", "cpu", "--cudagraphs"], "--cudagraphs needs --device cuda"),
    ],
)
def test_bad_options_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        step.parse_arguments(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err

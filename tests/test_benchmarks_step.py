"""``python -m benchmarks.step``: a tiny run, its figures, forced acceptance, processes, and what is left of a run cut short."""

import dataclasses
import json
import multiprocessing
import os
import signal

import pytest
import torch
from graphs import FakeRecorder
from torch._inductor.utils import run_and_get_code

from benchmarks import step, step_ways
from benchmarks.step_workers import Event, in_processes, in_this_process
from models.captured_step import CapturedStep
from models.config import KDAConfig
from models.speculation import SpeculativeStep

TINY = KDAConfig(
    vocab_size=13, hidden_size=12, num_layers=1, full_attn_period=0, num_heads=2, head_k_dim=4, head_v_dim=6,
    gate_rank=4, intermediate_size=8,
)  # fmt: skip
WAYS = (step_ways.UNTOUCHED, step_ways.REWRITTEN, step_ways.MERGED, step_ways.KEPT)
RUN = ["--preset", "tiny", "--drafts", "2", "--samples", "2", "--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    # argparse checks the preset's name against the same dictionary.
    monkeypatch.setitem(step.PRESETS, "tiny", TINY)


@pytest.fixture
def eager(monkeypatch):
    """Nothing is compiled, but all is run and timed."""
    monkeypatch.setattr(step_ways, "compile_fx", lambda graph, inputs, config_patches: graph)


def setting(accepted=None, drafts=7, ways=WAYS[:2], cudagraphs=False):
    return step_ways.Setting(TINY, drafts, "fp32", "fp32", "cpu", accepted, ways, cudagraphs, 3)


def test_a_compiled_run(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert step.main([*RUN, "--batch", "2", "--accepted", "2", "--jobs", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [f["way"] for f in result["figures"]] == ["untouched", "rewritten"]
    assert [f["layers"] for f in result["figures"]] == [{}, {"rewritten": 1, "refused": 0, "convolutions": 0}]
    for f in result["figures"]:
        low, high = f["quartiles_ms"]
        assert 0 < low <= f["step_ms"] <= high and f["peak_bytes"] > 0 and f["compile_s"] > 0
        assert f["accepted_mean"] == 2 and f["launch"] == "launched"
        assert f["tokens_per_second"] == pytest.approx(1e3 * 2 * f["batch"] / f["step_ms"])
    assert result["settings"]["accepted"] == 2 and result["wall_s"] > 0
    assert "1 layers rewritten, 0 refused, 0 convolutions" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS[:3])
def test_ways_are_what_they_say(way):
    s = dataclasses.replace(setting(drafts=1), config=dataclasses.replace(TINY, num_layers=2))
    recover = step_ways.pass_of(way)
    with torch.no_grad():
        compiled = step_ways.compile_step(s.step(s.model(), 2), recover)
        _, (code,) = run_and_get_code(compiled, *s.inputs(2))
    calls = {name: code.count(f"torch.ops.recoverssm.{name}.default(") for name in ("kda_commit", "kda_commit_layers")}
    expected = {
        step_ways.UNTOUCHED: (0, 0),
        step_ways.REWRITTEN: (2, 0),
        step_ways.MERGED: (0, 1),
        step_ways.SEPARATE: (2, 0),
    }
    assert tuple(calls.values()) == expected[way]
    # The pass is asked even where Inductor's caches hold the graph, or there would be no report of it.
    torch.compiler.reset()
    if recover is not None:
        with torch.no_grad():
            step_ways.compile_step(s.step(s.model(), 2), recover)(*s.inputs(2))
        assert [(report.matched, report.refused) for report in recover.reports] == [(2, 0)] * 2


def test_ways_with_and_without_convolutions():
    """As on a GPU, where the pass replaces them unless it is told not to."""
    s, on_gpu, replaced = setting(drafts=1), {"convolutions": True}, []
    for options in (on_gpu | step_ways.PASS_OPTIONS[way] for way in (step_ways.REWRITTEN, step_ways.KEPT)):
        recover = step_ways.RecoverSSMPass(**options)
        with torch.no_grad():
            step_ways.compile_step(s.step(s.model(), 2), recover)(*s.inputs(2))
        torch.compiler.reset()
        replaced.append((recover.last_report.matched, recover.last_report.convolutions_replaced))
    assert replaced == [(1, 1), (1, 0)]


def test_every_way_of_every_batch(eager, tmp_path, capsys):
    path = tmp_path / "figures.json"
    options = ["--batch", "2", "2", "1", "--merge-layers", "--keep-convolutions", "--jobs", "1", "--json", str(path)]
    assert step.main([*RUN, *options]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert [(f["batch"], f["way"]) for f in figures] == [(batch, way) for batch in (2, 1) for way in WAYS]
    shown = capsys.readouterr().out
    assert "batch 2: rewritten, merged commits: compiled in" in shown
    assert f"batch 1: untouched {figures[4]['step_ms']:.3f} ms (launched), rewritten" in shown


def test_captured_steps_are_measured_beside_launched_ones(eager, monkeypatch):
    """With a recorder that stands in for a GPU's."""
    monkeypatch.setattr(step_ways, "CapturedStep", lambda function: CapturedStep(function, recorder=FakeRecorder()))
    s = setting(3.0, drafts=4, cudagraphs=True)
    figures = [f for event in in_this_process(s, [1, 2]) for f in event.figures]
    keys = [(f["batch"], f["way"], f["launch"]) for f in figures]
    launches = (step_ways.LAUNCHED, step_ways.CAPTURED)
    assert keys == [(b, way, launch) for b in (1, 2) for way in WAYS[:2] for launch in launches]
    assert [f.get("graph_bytes") for f in figures] == [None, 2048] * 4
    assert all(f["accepted_mean"] == 3 and f["step_ms"] > 0 for f in figures)
    table = step.report(figures, s, "")
    assert table.row_count == 8
    # Each is compared with the untouched step of its own kind.
    speeds = list(table.columns[4].cells)
    assert speeds[0] == speeds[1] == speeds[4] == speeds[5] == "1.00"
    assert speeds[3] == f"{figures[1]['step_ms'] / figures[3]['step_ms']:.2f}"


def test_a_run_that_is_stopped_shows_and_keeps_what_it_has(eager, monkeypatch, tmp_path, capsys):
    """By the signal that a time limit sends, while the second batch size compiles."""
    path, handler = tmp_path / "figures.json", signal.getsignal(signal.SIGTERM)

    def stopped(s, batches):
        for event in in_this_process(s, batches):
            yield event
            if event.batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(step, "in_this_process", stopped)
    assert step.main([*RUN, "--batch", "1", "2", "3", "--jobs", "1", "--json", str(path)]) == 130
    shown = capsys.readouterr().out
    assert "│     1 │ rewritten │ launched │" in shown and "s in all, interrupted" in shown
    assert "batch sizes without figures: 2, 3" in shown
    assert [f["batch"] for f in json.loads(path.read_text())["figures"]] == [1, 1]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_batch_size_that_fails_leaves_the_others(eager, capsys):
    events = list(in_this_process(setting(), [1, -1, 2]))
    assert [(e.batch, e.failed, len(e.figures)) for e in events if e.failed or e.figures] == [
        (1, False, 2), (-1, True, 0), (2, False, 2),
    ]  # fmt: skip
    assert "-1" in events[3].text and "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_are_timed_when_all_have_compiled():
    """One of them ends by an error, one is killed, and one is measured all the same."""
    events: list[Event] = []
    for event in in_processes(setting(drafts=1), [2, 3, -1], jobs=3):
        events.append(event)
        if event.batch == 3 and not event.failed:
            (process,) = (p for p in multiprocessing.active_children() if p.name == "batch 3")
            process.kill()
    assert [e.failed for e in events if e.batch == 3] == [False, True]
    assert any("ended with status -9" in e.text for e in events if e.batch == 3)
    assert [e.failed for e in events if e.batch == -1] == [True]
    assert [len(e.figures) for e in events if e.batch == 2] == [0, 0, 2]
    # Nothing is timed while another batch size still compiles.
    assert events[-1].batch == 2 and events[-1].figures[1]["layers"]["rewritten"] == 1
    assert not multiprocessing.active_children()


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
        (["--jobs", "0"], "--jobs should be at least 1, got 0"),
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

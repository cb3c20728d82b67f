"""The pass does the same work for every layer and token: counted, not timed. And the benchmark that times it runs."""

import collections
import contextlib
import json
from unittest import mock

import pytest
import torch

from benchmarks import compile_time
from benchmarks.compile_time import copy_of, exponent, graph_before_the_pass
from compile_passes import rewrite
from compile_passes.reading import views


@contextlib.contextmanager
def counted():
    """How often the pass follows the request for an element of a tensor through a view."""
    counts = collections.Counter()

    def counting(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    steps = {target: counting("views followed", step) for target, step in views.VIEWS.items()}
    with mock.patch.dict(views.VIEWS, steps):
        yield counts


@pytest.fixture(scope="module")
def graphs():
    """Graphs of (layers, T)."""
    with torch.no_grad():
        return {key: graph_before_the_pass(*key, "cpu") for key in ((1, 2), (2, 2), (4, 2), (1, 4), (1, 8))}


def work(graph) -> collections.Counter:
    with counted() as counts:
        report = rewrite(copy_of(graph))
    assert report.refused == 0 and report.matched > 0
    return counts


def test_index_requests_grow_with_the_layers(graphs):
    """Twice the layers, twice the requests: a layer is read without looking at the others."""
    one, two, four = (work(graphs[layers, 2])["views followed"] for layers in (1, 2, 4))
    assert one > 20
    assert 1.8 * one <= two <= 2.2 * one and 1.8 * two <= four <= 2.2 * two


def test_index_requests_grow_with_the_window(graphs):
    """Quadratic growth would be a factor of 4."""
    two, four, eight = (work(graphs[1, T])["views followed"] for T in (2, 4, 8))
    assert 1.4 * two <= four <= 2.5 * two and 1.4 * four <= eight <= 2.5 * four


def test_exponents():
    assert exponent([(1, 2.0), (2, 4.0), (8, 16.0)]) == pytest.approx(1)
    assert exponent([(1, 3.0), (2, 12.0), (4, 48.0)]) == pytest.approx(2)


def test_the_command_measures_and_writes(tmp_path, capsys):
    path = tmp_path / "compile_time.json"
    sizes = ["--layers", "1", "2", "--window", "2", "3", "--at-layers", "1", "--at-window", "2", "--runs", "1"]
    assert compile_time.main([*sizes, "--device", "cpu", "--json", str(path), "--profile", "5"]) == 0
    figures = json.loads(path.read_text())
    assert [(g["layers"], g["window"], g["rewritten"]) for g in figures["growth"]] == [
        (1, 2, 1), (2, 2, 2), (1, 2, 1), (1, 3, 1),
    ]  # fmt: skip
    assert all(g["pass_s"] > 0 and g["nodes"] > 100 for g in figures["growth"])
    shown = capsys.readouterr().out
    assert "time grows as layers^" in shown and "recover_pass.py" in shown


@pytest.mark.parametrize(("power", "status"), [(1, 0), (2, 1)])
def test_check_fails_beyond_the_limits(monkeypatch, power, status):
    def growth(layers, window, device, runs):
        return compile_time.Growth(layers, window, 100 * layers, 1e-3 * layers**power * window, layers)

    monkeypatch.setattr(compile_time, "growth", growth)
    assert compile_time.main(["--check", "--device", "cpu"]) == status


def test_the_share_counts(monkeypatch):
    measured = compile_time.Share(4, 8, pass_s=1.0, inductor_s=20.0, total_s=30.0, pass_cpu_s=1.0, inductor_cpu_s=10.0)
    monkeypatch.setattr(compile_time, "growth", lambda n, T, device, runs: compile_time.Growth(n, T, n, n * T, n))
    monkeypatch.setattr(compile_time, "share", lambda *sizes: measured)
    assert measured.share == 0.05 and measured.cpu_share == 0.1
    assert compile_time.main(["--check", "--share", "--device", "cpu"]) == 1

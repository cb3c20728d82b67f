"""The figures: what is drawn, from files as the benchmarks write them; the drawing itself where matplotlib is installed."""

import json
from dataclasses import asdict

import pytest

from benchmarks import plots
from benchmarks.shapes import Shape


@pytest.fixture
def kernels() -> dict:
    rows = []
    for shape in (Shape(64, 12, 8), Shape(1, 12, 4, "fp32"), Shape(64, 12, 8, head_size=256)):
        for provider, us in (("recoverssm", 10.0), ("vllm", 40.0)):
            base = {**asdict(shape), "provider": provider, "floor_us": 5.0}
            rows.append({**base, "operation": "verify", "accepted": None, "us": us})
            rows += [{**base, "operation": "commit", "accepted": n, "us": us + n} for n in (1, shape.window // 2)]
    rows.append({**asdict(Shape(1, 12, 4, "fp32")), "provider": "flashinfer", "note": "bf16 pools and inputs only"})
    header = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "warm": False}
    return {"header": header, "rows": rows}


def step(batch: int) -> dict:
    figures = {
        name: {"step_ms": factor * batch, "quartiles_ms": [batch, 3.0 * batch], "peak_bytes": batch << 20}
        for name, factor in (("untouched", 2.0), ("through the pass", 1.0))
    }
    return {"settings": {"batch": str(batch), "preset": "bytes"}, "device": "a GPU", "figures": figures}


def test_kernel_rows_are_the_usual_shapes(kernels):
    verify = plots.kernel_rows(kernels, "verify")
    assert [row.label for row in verify] == ["bf16, B 64, H 12, T 8, D 128", "fp32, B 1, H 12, T 4, D 128"]
    assert verify[0].times == {"recoverssm": 10.0, "vllm": 40.0} and verify[0].floor == 5.0
    assert len(plots.kernel_rows(kernels, "verify", everything=True)) == 3


def test_commits_are_of_half_the_window(kernels):
    assert [row.times["recoverssm"] for row in plots.kernel_rows(kernels, "commit")] == [14.0, 12.0]


def test_steps_are_ordered_by_batch():
    series = plots.step_series([step(8), step(2)])
    assert [one.name for one in series] == ["untouched", "through the pass"]
    assert list(series[0].points.items()) == [(2, (4.0, 2, 6.0, 2 << 20)), (8, (16.0, 8, 24.0, 8 << 20))]


def test_series_differ_in_colour_and_marker():
    styles = [plots.style(at) for at in range(7)]
    assert len({s["color"] for s in styles}) == len({s["marker"] for s in styles}) == 7


def test_figures_are_written(tmp_path, kernels):
    pytest.importorskip("matplotlib")
    growth = [{"layers": n, "window": 4, "pass_s": 0.01 * n} for n in (1, 2, 4)]
    growth += [{"layers": 2, "window": T, "pass_s": 0.01 * T} for T in (2, 4)]
    for name, document in {"k": kernels, "s1": step(1), "s2": step(4), "c": {"growth": growth}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    files = {name: str(tmp_path / f"{name}.json") for name in ("k", "s1", "s2", "c")}
    arguments = ["--kernels", files["k"], "--steps", files["s1"], files["s2"], "--compile-time", files["c"]]
    plots.main([*arguments, "--out", str(tmp_path / "out")])
    written = {path.name: path.read_bytes()[:4] for path in (tmp_path / "out").iterdir()}
    assert {*written} == {"kernels_verify.png", "kernels_commit.png", "steps.png", "compile_time.png"}
    assert {*written.values()} == {b"\x89PNG"}


def test_axes_carry_units(kernels):
    pytest.importorskip("matplotlib")
    (axes,) = plots.draw_kernels(plots.kernel_rows(kernels, "verify"), "verify", "a GPU").axes
    assert "µs" in axes.get_xlabel()
    time, memory = plots.draw_steps(plots.step_series([step(1), step(4)]), "a GPU").axes
    assert "ms" in time.get_ylabel() and "GiB" in memory.get_ylabel() and "batch" in memory.get_xlabel()

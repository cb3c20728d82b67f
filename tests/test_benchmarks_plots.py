"""The figures: what is drawn, from files that the benchmarks have written here; the drawing where matplotlib is installed."""

import json

import pytest

from benchmarks import kernels, plots, step, step_ways
from models.config import KDAConfig

TINY = KDAConfig(
    vocab_size=13, hidden_size=12, num_layers=1, full_attn_period=0, num_heads=2, head_k_dim=4, head_v_dim=6,
    gate_rank=4, intermediate_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Runs of the commands themselves, on shapes as small as they come; steps are timed as they are, not compiled."""
    folder = tmp_path_factory.mktemp("json")
    options = ["--device", "cpu", "--samples", "2"]
    layer = [*options, "--providers", "recoverssm", "portable", "--heads", "2", "--head-size", "8", "--sets", "2"]
    kernels.main([*layer, "--batch", "2", "3", "--window", "4", "--json", str(folder / "targets.json")])
    several = ["--batch", "1", "--window", "2", "--op", "step", "--json", str(folder / "layers.json")]
    kernels.main([*layer, *several])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step.PRESETS, "tiny", TINY)
        patch.setattr(step_ways, "compile_fx", lambda graph, inputs, config_patches: graph)
        for name, batches in {"large": ["4"], "small": ["2", "1"]}.items():
            tiny = ["--preset", "tiny", "--drafts", "1", "--dtype", "fp32", "--jobs", "1", "--batch", *batches]
            step.main([*options, *tiny, "--json", str(folder / f"{name}.json")])
    growth = [{"layers": n, "window": 4, "pass_s": 0.01 * n} for n in (1, 2, 4)]
    growth += [{"layers": 2, "window": T, "pass_s": 0.01 * T} for T in (2, 4)]
    (folder / "compile.json").write_text(json.dumps({"growth": growth}))
    return folder


def read(folder, *names):
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


def test_kernel_rows_are_those_of_the_files(files):
    documents = read(files, "targets", "layers")
    rows = plots.kernel_rows(documents, "verify", everything=True)
    assert [row.label for row in rows] == ["bf16, B 2, H 2, T 4, D 8", "bf16, B 3, H 2, T 4, D 8"]
    for row, batch in zip(rows, (2, 3), strict=True):
        written = [r for r in documents[0]["rows"] if r["batch"] == batch and r["operation"] == "verify"]
        assert row.times == {r["provider"]: r["us"] for r in written} and len(row.times) == 2
        assert row.floor == written[0]["floor_us"]
    assert [row.label[:9] for row in plots.kernel_rows(documents, "step", everything=True)] == [
        "bf16, B 2", "bf16, B 3", "bf16, B 1",
    ]  # fmt: skip


def test_kernel_rows_are_of_usual_shapes_unless_all_are_asked_for(files):
    (document,) = read(files, "targets")
    assert plots.kernel_rows([document], "verify") == []
    for row in document["rows"]:
        row["head_size"] = 128 if row["batch"] == 3 else 8
    assert [row.label for row in plots.kernel_rows([document], "verify")] == ["bf16, B 3, H 2, T 4, D 128"]


def test_commits_are_of_half_the_window(files):
    documents = read(files, "targets")
    times = [row.times["recoverssm"] for row in plots.kernel_rows(documents, "commit", everything=True)]
    assert times == [
        r["us"]
        for r in documents[0]["rows"]
        if (r["provider"], r["operation"], r["accepted"]) == ("recoverssm", "commit", 2)
    ]
    assert len(times) == 2


def test_steps_are_ordered_by_batch(files):
    documents = read(files, "large", "small")
    series = plots.step_series(documents)
    assert [one.name for one in series] == ["untouched", "rewritten"]
    for one in series:
        assert [*one.points] == [1, 2, 4]
        (large,) = (f for f in documents[0]["figures"] if f["way"] == one.name)
        assert one.points[4] == (large["step_ms"], *large["quartiles_ms"], large["peak_bytes"])


def test_captured_steps_are_drawn_where_there_are_any(files):
    (document,) = read(files, "small")
    for figure in list(document["figures"]):
        document["figures"].append(figure | {"launch": "captured", "step_ms": 7 * figure["step_ms"]})
    launched, captured = (plots.step_series(x)[0].points for x in (read(files, "small"), [document]))
    assert captured[2][0] == pytest.approx(7 * launched[2][0])


def test_series_differ_in_colour_and_marker():
    styles = [plots.style(at) for at in range(7)]
    assert len({s["color"] for s in styles}) == len({s["marker"] for s in styles}) == 7


def test_figures_are_written(tmp_path, files, capsys):
    pytest.importorskip("matplotlib")
    targets, layers, large, small, compile_ = (
        str(files / f"{name}.json") for name in ("targets", "layers", "large", "small", "compile")
    )
    options = ["--kernels", targets, layers, "--all-shapes", "--steps", large, small, "--compile-time", compile_]
    plots.main([*options, "--out", str(tmp_path / "out")])
    written = {path.name: path.read_bytes()[:4] for path in (tmp_path / "out").iterdir()}
    names = ("kernels_verify", "kernels_commit", "kernels_step", "steps", "compile_time")
    assert {*written} == {f"{name}.png" for name in names}
    assert {*written.values()} == {b"\x89PNG"}
    shown = capsys.readouterr().out
    assert all(f"{name}.png" in shown for name in names)


def test_axes_carry_units(files):
    pytest.importorskip("matplotlib")
    rows = plots.kernel_rows(read(files, "targets"), "verify", everything=True)
    (axes,) = plots.draw_kernels(rows, "verify", "a machine").axes
    assert "µs" in axes.get_xlabel()
    time, memory = plots.draw_steps(plots.step_series(read(files, "large", "small")), "a machine").axes
    assert "ms" in time.get_ylabel() and "MiB" in memory.get_ylabel() and "batch" in memory.get_xlabel()
    assert len([text for text in time.texts if text.get_text().endswith("as fast")]) == 3

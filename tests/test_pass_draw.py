"""The picture of a report: an SVG that holds what the report says, and that nothing overlaps in."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from small_layer import STATE_RETURNED, make_inputs
from spellings import Spelling, Step, inputs

from compile_passes import REASONS, LayerMatch, Report, explain
from compile_passes.reporting.draw import BARS, LETTER, WIDTH
from compile_passes.reporting.layer_nodes import LayerNodes

SVG = "{http://www.w3.org/2000/svg}"


def drawn(report, path):
    root = ElementTree.parse(report.draw(path)).getroot()
    texts = [t.text for t in root.iter(f"{SVG}text")]
    bars = {}
    for r in root.iter(f"{SVG}rect"):
        if r.get("class"):
            bars.setdefault(r.get("class"), []).append(r)
    return root, texts, bars


@pytest.fixture
def path(tmp_path):
    torch._dynamo.reset()
    return tmp_path / "before_after.svg"


def test_rewritten_layers_before_and_after(path):
    s = Spelling(T=3, layers=2)
    report = explain(Step(s), *inputs(s))
    _, texts, bars = drawn(report, path)
    together = "\n".join(texts)
    for layer in report.layers:
        nodes = layer.nodes
        assert nodes.state == "[3, 2, 6, 8] float32" and nodes.record == "[3, 3, 2, 6] float32" and nodes.tokens == 3
        assert nodes.states.startswith(f"{layer.node} [") and nodes.writeback.startswith("index_put")
        for line in (
            f"before: window from {nodes.checkpoint}",
            f"3 states {nodes.state}",
            f"3.4 KiB in {layer.node}",
            f"select one: {nodes.selection}",
            f"write back: {nodes.writeback}",
            f"after: kda_verify reads {nodes.checkpoint}",
            f"record u {nodes.record}",
            "432 B; k and g are there already",
            f"kda_commit updates {nodes.checkpoint}",
        ):
            assert line in together
    assert together.count("spellings.py:") == 2 and report.total() in texts[0]
    assert len(bars["state"]) == len(bars["record"]) == 2 * 3
    # A record is as much narrower than a state as it has fewer bytes.
    ratio = float(bars["record"][0].get("width")) / float(bars["state"][0].get("width"))
    assert ratio == pytest.approx(432 / 3456, abs=0.01)


def test_recovered_state_is_drawn_beside_the_record(path):
    s = Spelling(T=3, checkpoint="functional")
    _, texts, bars = drawn(explain(Step(s), *inputs(s)), path)
    assert len(bars["record"]) == 3 and len(bars["selected"]) == 1
    assert float(bars["selected"][0].get("width")) == BARS
    assert any(t.startswith("kda_recover gives ") for t in texts) and "the selected state, 1.1 KiB" in texts
    assert not any("write back" in t for t in texts)


def test_refused_layer_says_why_and_what_to_do(path):
    reason = "state_escapes"
    report = explain(STATE_RETURNED, *make_inputs())
    _, texts, bars = drawn(report, path)
    found, _, cure = REASONS[reason].partition("; ")
    assert {f"left as it is: {reason}", found, f"cure: {cure}", f"seen at {report.layers[0].node}"} <= set(texts)
    assert "state" in bars and "record" not in bars


def test_text_stays_inside_and_boxes_apart(path):
    s = Spelling(T=8)
    report = explain(Step(s), *inputs(s))
    report.layers += [layer_with(source="a" * 500, module="m" * 300), *report.layers]
    root, _, _ = drawn(report, path)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width == WIDTH
    boxes = []
    for r in list(root)[2:]:
        if r.tag == f"{SVG}rect":
            x, y, w, h = (float(r.get(k)) for k in ("x", "y", "width", "height"))
            assert x + w <= width and y + h <= height
            assert all(x >= b[0] + b[2] or x + w <= b[0] or y >= b[1] + b[3] or y + h <= b[1] for b in boxes)
            boxes.append((x, y, w, h))
        elif r.tag == f"{SVG}text":
            assert float(r.get("x")) + len(r.text) * LETTER <= width and float(r.get("y")) < height
    lines = sorted((float(r.get("y")), float(r.get("x"))) for r in root.iter(f"{SVG}text"))
    for (y, x), (below, beside) in itertools.pairwise(lines):
        assert below - y >= 12 or abs(x - beside) > 100, "lines on top of each other"


def layer_with(source: str, module: str = "") -> LayerMatch:
    nodes = LayerNodes(2, "cat [3, 2, 2, 6, 8] float32", "[3, 2, 6, 8] float32")
    return LayerMatch(False, "state_escapes", source, "n" * 200, 100, 100, None, module, source, nodes)


def test_source_lines_are_escaped(path):
    _, texts, _ = drawn(Report([layer_with("model.py:3: if a < b & c: x = '<text>'")]), path)
    assert "model.py:3: if a < b & c: x = '<text>'" in texts


def test_empty_report_draws_its_sentence(path):
    _, texts, bars = drawn(Report(), path)
    assert "no per-position states found" in " ".join(texts) and not bars


@pytest.mark.parametrize("name", ["before_after.png", "before_after", "svg", "a.svg.pdf"])
def test_other_suffixes_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"has to end in \.svg"):
        Report().draw(str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_a_name_and_a_path_both_work(path):
    assert Report().draw(str(path)) == path and path.exists()


def test_dynamic_sizes_are_those_of_the_example(path):
    s = Spelling(T=2, shapes="all_dynamic")
    report = explain(Step(s), *inputs(s), dynamic=True)
    assert report.layers[0].nodes.state == "[3, 2, 6, 8] float32"
    drawn(report, path)

"""A picture of what was replaced: plain SVG, no library needed to write it and any browser to read it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from compile_passes.matching.reasons import REASONS
from compile_passes.reporting.readable import readable

if TYPE_CHECKING:
    from compile_passes.reporting.report import LayerMatch, Report

WIDTH, MARGIN, COLUMN, GAP = 1000, 20, 470, 20
BOX, ARROW, BAR, LETTER = 26, 16, 8, 7.3  # heights; the width of a letter at 12 px
BARS = 160  # the width of one state; a record's is in proportion to its bytes
FIT = int((COLUMN - 16) / LETTER)  # letters in a box
INK, BEFORE, AFTER, PLAIN = "#1f2328", "#f2a65a", "#4f9d69", "#e8eaed"


class Canvas:
    """Rectangles, lines of text and arrows, downwards."""

    def __init__(self):
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, *, width: float = WIDTH - 2 * MARGIN, bold: bool = False) -> None:
        fit = int(width / LETTER)
        words = words if len(words) <= fit else words[: fit - 1] + "…"
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{weight}>{escape(words)}</text>')

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, kind: str) -> None:
        box = f'x="{x:g}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
        self.shapes.append(f'<rect class="{kind}" {box} fill="{fill}" stroke="{INK}" stroke-width="0.6"/>')

    def box(self, x: float, y: float, words: str, fill: str) -> float:
        self.rectangle(x, y, COLUMN, BOX, fill, "box")
        self.text(x + 8, y + 17, words, width=COLUMN - 16)
        return y + BOX

    def arrow(self, x: float, y: float) -> float:
        x, tip = x + 24, y + ARROW
        self.shapes.append(
            f'<path d="M{x:g} {y:g}V{tip - 5:g}M{x - 4:g} {tip - 6:g}L{x:g} {tip:g}L{x + 4:g} {tip - 6:g}"/>'
        )
        return tip

    def bars(self, x: float, y: float, count: int, width: float, words: Iterable[str], fill: str, kind: str) -> float:
        """One bar a token, as wide as it is large, and what they are beside them."""
        for t in range(count):
            self.rectangle(x + 8, y + t * BAR, max(width, 1), BAR - 2, fill, kind)
        lines = list(words)
        for line, content in enumerate(lines):
            self.text(x + 8 + BARS + 12, y + 10 + 15 * line, content, width=COLUMN - BARS - 28)
        return y + max(count * BAR, 15 * len(lines))

    def svg(self, height: float) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}">'
        style = f"text{{font:12px monospace;fill:{INK}}}path{{stroke:{INK};fill:none}}"
        body = "\n".join(self.shapes)
        return f'{head}\n<style>{style}</style>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def draw(report: Report, path: str | Path) -> Path:
    """Write the layers of ``report`` before and after the rewrite to an SVG file, and return its path."""
    path = Path(path)
    if path.suffix.lower() != ".svg":
        raise ValueError(f"draw writes SVG: the file name has to end in .svg, got {path.name!r}")
    canvas, y = Canvas(), MARGIN
    for line in [f"RecoverSSM: {report.total()}"] if report.layers else str(report).splitlines():
        y += 16
        canvas.text(MARGIN, y, line, bold=True)
    for number, layer in enumerate(report.layers):
        y = _layer(canvas, y + 34, number, layer)
    path.write_text(canvas.svg(y + MARGIN), encoding="utf-8")
    return path


def _layer(canvas: Canvas, y: float, number: int, layer: LayerMatch) -> float:
    canvas.text(MARGIN, y, f"layer {number} {layer.module}".rstrip(), bold=True)
    canvas.text(MARGIN, y + 16, layer.stacked or layer.source)
    left, right, y = MARGIN, MARGIN + COLUMN + GAP, y + 28
    before = _before(canvas, left, y, layer)
    return max(before, _after(canvas, right, y, layer) if layer.matched else _refusal(canvas, right, y, layer))


def _before(canvas: Canvas, x: float, y: float, layer: LayerMatch) -> float:
    nodes = layer.nodes
    y = canvas.arrow(x, canvas.box(x, y, f"before: window from {nodes.checkpoint or 'a checkpoint'}", PLAIN))
    words = [
        f"{nodes.tokens} states {nodes.state}",
        f"{readable(layer.state_bytes_before)} in {nodes.states.split()[0]}",
    ]
    y = canvas.bars(x, y, nodes.tokens, BARS, words, BEFORE, "state")
    if nodes.selection:
        y = canvas.box(x, canvas.arrow(x, y + 2), f"select one: {nodes.selection}", PLAIN)
    if nodes.writeback:
        y = canvas.box(x, canvas.arrow(x, y), f"write back: {nodes.writeback}", PLAIN)
    return y


def _after(canvas: Canvas, x: float, y: float, layer: LayerMatch) -> float:
    nodes = layer.nodes
    y = canvas.arrow(x, canvas.box(x, y, f"after: kda_verify reads {nodes.checkpoint}", PLAIN))
    recovers = layer.form == "recover"
    state = layer.state_bytes_before / nodes.tokens
    record = layer.state_bytes_after - (state if recovers else 0)
    words = [f"record u {nodes.record}", f"{readable(round(record))}; k and g are there already"]
    y = canvas.bars(x, y, nodes.tokens, BARS * record / layer.state_bytes_before, words, AFTER, "record")
    last = f"kda_recover gives {nodes.selection}" if recovers else f"kda_commit updates {nodes.checkpoint}"
    y = canvas.box(x, canvas.arrow(x, y + 2), last, PLAIN)
    if recovers:
        words = [f"the selected state, {readable(round(state))}"]
        y = canvas.bars(x, canvas.arrow(x, y), 1, BARS, words, AFTER, "selected")
    return y


def _refusal(canvas: Canvas, x: float, y: float, layer: LayerMatch) -> float:
    y = canvas.box(x, y, f"left as it is: {layer.reason}", PLAIN)
    found, _, cure = REASONS[layer.reason].partition("; ")
    for line in (*wrap(found, FIT), *wrap(f"cure: {cure}" if cure else "", FIT), f"seen at {layer.node}", layer.source):
        y += 17
        canvas.text(x + 8, y, line, width=COLUMN - 16)
    return y

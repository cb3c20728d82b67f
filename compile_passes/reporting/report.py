"""What the pass did, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from compile_passes.matching.reasons import REASONS
from compile_passes.reporting.draw import draw
from compile_passes.reporting.layer_nodes import LayerNodes
from compile_passes.reporting.readable import readable


@dataclass(frozen=True)
class LayerMatch:
    """One place where states of several positions are put together.

    Attributes:
        matched: whether it was rewritten.
        reason: None when matched, else a key of :data:`compile_passes.matching.reasons.REASONS`.
        source: file, line and text of the source line, or the node's name where the graph holds no source.
        node: name of the graph node where the difference was seen, or of the stack of states.
        state_bytes_before: bytes of the states after every window position.
        state_bytes_after: bytes that take their place: the record's ``u``, and for a recovered state that state.
        form: ``commit`` (the pool is updated in place), ``recover`` (the selected state is returned), or None.
        module: the module whose ``forward`` stacks the states (``layers.3``), empty outside of submodules.
        stacked: the source line that stacks the states: which layer it is, where ``source`` is in a shared helper.
        nodes: the layer's graph nodes with their shapes, in words.
    """

    matched: bool
    reason: str | None
    source: str
    node: str
    state_bytes_before: int
    state_bytes_after: int
    form: str | None = None
    module: str = ""
    stacked: str = ""
    nodes: LayerNodes | None = None


@dataclass
class Report:
    """The layers of one or more graphs, in graph order."""

    layers: list[LayerMatch] = field(default_factory=list)

    @property
    def matched(self) -> int:
        return sum(layer.matched for layer in self.layers)

    @property
    def refused(self) -> int:
        return len(self.layers) - self.matched

    def __str__(self) -> str:
        if not self.layers:
            return (
                "RecoverSSM: no per-position states found. The pass looks for T >= 2 states of a loop over the window, put "
                "together by torch.stack or torch.cat and selected by the accepted position."
            )
        rows = [("layer", "module", "result", "states before", "after", "source")]
        for number, layer in enumerate(self.layers):
            result = f"rewritten ({layer.form})" if layer.matched else f"refused: {layer.reason}"
            after = readable(layer.state_bytes_after) if layer.matched else "-"
            rows.append((str(number), layer.module, result, readable(layer.state_bytes_before), after, layer.source))
        rows = [list(row) for row in zip(*(c for c in zip(*rows, strict=True) if any(c[1:])), strict=True)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        for number, layer in enumerate(self.layers):
            if layer.stacked not in ("", layer.source):
                lines.append(f"layer {number}: states stacked at {layer.stacked}")
        for reason in sorted({layer.reason for layer in self.layers if layer.reason}):
            lines.append(f"{reason}: {REASONS[reason]} (docs/troubleshooting.md)")
        lines.append(self.total())
        return "\n".join(lines)

    def draw(self, path: str | Path) -> Path:
        """Write a picture of every layer before and after the rewrite, as SVG (``before_after.svg``)."""
        return draw(self, path)

    def total(self) -> str:
        """One line: how many layers, how many bytes."""
        counts = f"{self.matched} rewritten, {self.refused} refused"
        if not self.matched:
            return counts
        before = sum(layer.state_bytes_before for layer in self.layers)
        after = sum(layer.state_bytes_after for layer in self.layers)
        return f"{counts}; states after every position {readable(before)} -> {readable(after)}"

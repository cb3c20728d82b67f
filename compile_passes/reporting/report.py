"""What the pass did, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from compile_passes.convolutions.reasons import CONVOLUTION_REASONS
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


@dataclass(frozen=True)
class ConvolutionMatch:
    """One short convolution over a history from a pool.

    Attributes:
        matched: whether the operators took its place and its update's.
        reason: None when matched, else a key of :data:`compile_passes.convolutions.reasons.CONVOLUTION_REASONS`.
        source: the source line that computes its outputs, or where the difference was seen; else the node's name.
        node: that graph node.
        module: the module whose ``forward`` it is in, empty outside of submodules.
    """

    matched: bool
    reason: str | None
    source: str
    node: str
    module: str = ""


@dataclass
class Report:
    """The layers of one or more graphs, in graph order, and the short convolutions in front of them.

    ``matched``, ``refused`` and ``len(layers)`` count layers with per-position states; convolutions have counts of their own.
    """

    layers: list[LayerMatch] = field(default_factory=list)
    convolutions: list[ConvolutionMatch] = field(default_factory=list)

    @classmethod
    def joined(cls, reports: Iterable[Report]) -> Report:
        """One report of several graphs."""
        reports = list(reports)
        layers, convolutions = ([x for r in reports for x in getattr(r, kind)] for kind in ("layers", "convolutions"))
        return cls(layers, convolutions)

    @property
    def matched(self) -> int:
        return sum(layer.matched for layer in self.layers)

    @property
    def refused(self) -> int:
        return len(self.layers) - self.matched

    @property
    def convolutions_replaced(self) -> int:
        return sum(convolution.matched for convolution in self.convolutions)

    @property
    def convolutions_left(self) -> int:
        return len(self.convolutions) - self.convolutions_replaced

    def __str__(self) -> str:
        return "\n".join([*self._layer_lines(), *self._convolution_lines()])

    def _convolution_lines(self) -> list[str]:
        """One line for those that were replaced, one for each that was not."""
        if not self.convolutions:
            return []
        lines = [
            f"short convolutions: {self.convolutions_replaced} replaced, {self.convolutions_left} left to the compiler"
        ]
        for c in self.convolutions:
            if not c.matched:
                lines.append(f"  {c.module + ' ' if c.module else ''}left: {c.reason}  {c.source}")
        reasons = sorted({c.reason for c in self.convolutions if c.reason})
        return lines + [f"  {reason}: {CONVOLUTION_REASONS[reason]} (docs/pass.md)" for reason in reasons]

    def _layer_lines(self) -> list[str]:
        if not self.layers:
            return [
                "RecoverSSM: no per-position states found. The pass looks for T >= 2 states of a loop over the window, put "
                "together by torch.stack or torch.cat and selected by the accepted position."
            ]
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
        return lines

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

"""What the pass did, through the logger ``compile_passes``.

``TORCH_LOGS="+compile_passes"`` (DEBUG) and ``TORCH_LOGS="compile_passes"`` (INFO) show it, as does any configuration of
Python's own logging. INFO is one line a layer, DEBUG adds the nodes and the cures. By default only the warning is seen.
"""

from __future__ import annotations

import logging

import torch

from compile_passes.convolutions.reasons import CONVOLUTION_REASONS
from compile_passes.matching.reasons import REASONS
from compile_passes.reporting.readable import readable
from compile_passes.reporting.report import ConvolutionMatch, LayerMatch, Report

log = logging.getLogger("compile_passes")
_said: set[tuple] = set()  # a process warns once about the same thing, like Python's own warnings


def log_layer(layer: LayerMatch) -> None:
    """One line at INFO, the details at DEBUG."""
    name = layer.module or layer.node
    before, after = readable(layer.state_bytes_before), readable(layer.state_bytes_after)
    if layer.matched:
        log.info("rewrote %s (%s), %s of states -> %s: %s", name, layer.form, before, after, layer.source)
        log.debug("%s: states stacked in node %s", name, layer.node)
    else:
        log.info("left %s alone, %s: %s", name, layer.reason, layer.source)
        log.debug("%s: seen at node %s, states stacked at %s", name, layer.node, layer.stacked)
        log.debug("%s: %s", layer.reason, REASONS[layer.reason])


def log_convolution(convolution: ConvolutionMatch) -> None:
    """The same for a short convolution."""
    name = convolution.module or convolution.node
    if convolution.matched:
        log.info("replaced the short convolution of %s: %s", name, convolution.source)
    else:
        log.info("left the short convolution of %s alone, %s: %s", name, convolution.reason, convolution.source)
        log.debug("%s: %s", convolution.reason, CONVOLUTION_REASONS[convolution.reason])


def warn_if_nothing_was_rewritten(report: Report) -> None:
    """A pass that was asked for and does nothing says so, once for the same layers.

    A graph without any window is no sign of a mistake beside graphs that were rewritten (the other side of a graph break,
    the prompt), so that is said only while nothing has been rewritten in this process.
    """
    if report.matched:
        _said.add(("nothing found",))
        return
    if report.convolutions_replaced and not report.layers:
        return
    seen = ("nothing found",) if not report.layers else tuple((x.reason, x.source, x.module) for x in report.layers)
    if seen in _said:
        return
    _said.add(seen)
    found = ", ".join(sorted({f"{x.reason} at {x.source}" for x in report.layers}))
    log.warning(
        'backend="recoverssm" rewrote 0 layers of a graph: %s. %sprint(compile_passes.explain(fn, *args)) says what the '
        "pass sees; docs/troubleshooting.md has the cures.",
        found or "no per-position states found in it",
        "Gradients were on, and a backward pass keeps the states: compile under torch.no_grad(). "
        if torch.is_grad_enabled()
        else "",
    )

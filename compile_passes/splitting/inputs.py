"""The placeholders of a traced graph: what each of them is in a call, and whether the graph was made for a call's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass
class Inputs:
    """``kinds``: for every placeholder ``("tensor", number)``, ``("state", name in module)`` or ``("constant", tensor)``."""

    kinds: dict[Node, tuple[str, object]]
    module: nn.Module
    environment: ShapeEnv | None
    seen: dict[tuple, dict | None] = field(default_factory=dict)

    def value(self, node: Node, tensors: list[Tensor]) -> Tensor:
        """What a placeholder is in this call."""
        kind, place = self.kinds[node]
        if kind == "state":
            owner, _, name = place.rpartition(".")
            return getattr(self.module.get_submodule(owner), name)
        return tensors[place] if kind == "tensor" else place

    def fits(self, tensors: list[Tensor]) -> dict | None:
        """The sizes of the graph's symbols in this call; None if it was traced for other tensors."""
        key = tuple((x.dtype, x.device, x.shape) for x in tensors)
        if key not in self.seen:
            self.seen[key] = self._sizes(tensors)
        return self.seen[key]

    def _sizes(self, tensors: list[Tensor]) -> dict | None:
        sizes: dict = {}
        for node, (kind, place) in self.kinds.items():
            if kind != "tensor" or place >= len(tensors):
                continue
            expected, given = node.meta["val"], tensors[place]
            if (expected.dtype, expected.device, expected.ndim) != (given.dtype, given.device, given.ndim):
                return None
            for n, size in zip(expected.shape, given.shape, strict=True):
                if n != size if isinstance(n, int) else sizes.setdefault(n.node.expr, size) != size:
                    return None
        if not sizes:
            return sizes
        symbols = {symbol: size for symbol, size in sizes.items() if symbol.is_symbol}
        environment = self.environment
        limits = {symbol: environment.var_to_range[symbol] for symbol in symbols if symbol in environment.var_to_range}
        fits = all(limit.lower <= symbols[symbol] <= limit.upper for symbol, limit in limits.items())
        fits &= all(_holds(sympy.Eq(expression, size), symbols) for expression, size in sizes.items())
        return symbols if fits and all(_holds(guard.expr, symbols) for guard in environment.guards) else None


def _holds(condition, sizes: dict) -> bool:
    """A condition on sizes that are not known yet (those of another part of the step) is left to that part."""
    value = condition.xreplace(sizes)
    return bool(value) if not value.free_symbols else True


def number(n: int | torch.SymInt, sizes: dict) -> int:
    """A size of the graph in a call whose symbols have these sizes."""
    return n if isinstance(n, int) else int(n.node.expr.xreplace(sizes))

"""A speculative window as the pass understands it: what was read off the graph, before anything is edited."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from compile_passes.reading.algebra import Product
from compile_passes.reading.index_notation import Axis, Element, Lookup


@dataclass
class Roles:
    """Which axis of the state is which. Batch and head are None where their size is 1."""

    batch: Axis | None
    head: Axis | None
    value: Axis
    key: Axis


@dataclass
class Step:
    """The inputs of one step. ``decay`` is empty where there is none; without a ``beta`` there is no delta: u = value."""

    decay: list[Element]
    key: list[Element]
    beta: Product | None
    value: Product
    value_axis: Axis
    key_axis: Axis


@dataclass
class Output:
    """``node[axes] = coefficient * sum_k S_t q_t``, of one token or of all of them: then ``token`` is one of the axes."""

    node: Node
    axes: list[Axis | None]
    coefficient: float
    query: list[Element]
    token: Axis | None = None


@dataclass(frozen=True)
class Where:
    """One of two counts, as a condition has it."""

    condition: Element
    then: Count
    otherwise: Count


@dataclass(frozen=True)
class Position:
    """A looked-up position among ``count``, the first of which is the state after ``first`` tokens.

    ``or_zero``: a position outside selects zeros (one-hot weights) instead of counting from the end.
    """

    lookup: Lookup
    count: int
    first: int
    or_zero: bool = False


# How many tokens a selected state has seen.
Count = int | Where | Position


@dataclass
class Selection:
    """``node[axes]`` is the state after ``count`` tokens, rounded to ``dtype`` on its way."""

    node: Node
    axes: list[Axis | None]
    count: Count
    dtype: torch.dtype


@dataclass
class Window:
    """A matched window of T tokens of one layer. ``outputs`` has one entry a token; None where none is read."""

    anchor: Node
    states: list[Element]
    checkpoint: Element
    roles: Roles
    steps: list[Step]
    outputs: list[Output | None]
    selection: Selection

    @property
    def length(self) -> int:
        return len(self.steps)

    @property
    def delta(self) -> bool:
        return self.steps[0].beta is not None

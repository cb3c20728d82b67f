"""A speculative window as the pass understands it: what was read off the graph, before anything is edited."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from compile_passes.index_notation import Axis, Element, Lookup


@dataclass
class Roles:
    """Which axis of the state is which. Batch and head are None where their size is 1."""

    batch: Axis | None
    head: Axis | None
    value: Axis
    key: Axis


@dataclass
class Step:
    """The inputs of one step, each a product of elements; ``decay`` is empty for the plain delta rule."""

    decay: list[Element]
    key: list[Element]
    beta: list[Element]
    value: list[Element]
    value_axis: Axis
    key_axis: Axis


@dataclass
class Output:
    """``node[axes] = coefficient * sum_k S_t q_t``."""

    node: Node
    axes: list[Axis | None]
    coefficient: float
    query: list[Element]


@dataclass
class Selection:
    """``node[axes]`` is the state after ``position + 1`` tokens."""

    node: Node
    axes: list[Axis | None]
    position: Lookup


@dataclass
class Window:
    """A matched window of T tokens of one layer."""

    stack: Node
    states: list[Element]
    checkpoint: Element
    roles: Roles
    steps: list[Step]
    outputs: list[Output]
    selection: Selection

    @property
    def length(self) -> int:
        return len(self.steps)

"""State pools with guard elements, seeded windows, and the oracle's answer for a whole batch."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from recoverssm_ops.reference import recurrence

SETTINGS_OF_THE_ORACLE = (
    "A_log",
    "dt_bias",
    "lower_bound",
    "scale",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x``: comparisons that tell -0.0 from 0.0 and NaN from nothing."""
    return x.detach().cpu().contiguous().view(torch.uint8)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


@dataclass
class GuardedPool:
    """A pool ``[slots, HV, V, K]`` that is a view into a larger allocation full of NaN guards.

    A kernel that reads a guard gets NaN into its result; one that writes a guard is caught by :meth:`check_guards`.
    """

    state: Tensor
    storage: Tensor
    before: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.remember()

    def remember(self) -> None:
        self.before = self.storage.clone()

    def _changed(self) -> Tensor:
        width = self.storage.element_size()
        return (bits(self.storage) != bits(self.before)).view(-1, width).any(1)

    def check_guards(self) -> None:
        """No element outside the view has changed."""
        inside = torch.zeros(self.storage.shape, dtype=torch.bool)
        inside.as_strided(self.state.shape, self.state.stride(), self.state.storage_offset()).fill_(True)
        wrong = self._changed() & ~inside
        assert not wrong.any(), (
            f"{int(wrong.sum())} guard elements were overwritten, first at {int(wrong.nonzero()[0])}"
        )

    def check_unchanged(self) -> None:
        """No element at all has changed."""
        wrong = self._changed()
        assert not wrong.any(), f"{int(wrong.sum())} elements of the pool were written"

    def check_only_written(self, slots) -> None:
        """Guards intact, and no slot but ``slots`` has changed."""
        self.check_guards()
        old = self.before.as_strided(self.state.shape, self.state.stride(), self.state.storage_offset())
        for slot in set(range(self.state.shape[0])) - {int(s) for s in slots}:
            assert same_bits(self.state[slot], old[slot]), f"slot {slot} was written, but was not named"


def guarded_pool(
    slots: int,
    value_heads: int,
    value_dim: int,
    key_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    order: str = "slot-first",
    guard: int = 5,
    seed: int = 0,
) -> GuardedPool:
    """A pool of seeded normal values with ``guard`` guard elements between rows, heads and slots and at both ends.

    ``order``: "slot-first" or "head-first", the outer axis in memory. ``guard=0`` with slot-first is a contiguous pool.
    """
    row = key_dim + guard
    if order == "slot-first":
        head_stride = value_dim * row + guard
        slot_stride = value_heads * head_stride + guard
        size = slots * slot_stride
    else:
        slot_stride = value_dim * row + guard
        head_stride = slots * slot_stride + guard
        size = value_heads * head_stride
    storage = torch.full((2 * guard + size,), float("nan"), dtype=dtype, device=device)
    state = storage.as_strided((slots, value_heads, value_dim, key_dim), (slot_stride, head_stride, row, 1), guard)
    state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(seed)))
    return GuardedPool(state, storage)


@dataclass
class Window:
    """The inputs of one verify call: ``verify(*window.inputs, state, slots, **window.options)``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    options: dict
    lengths: list[int]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def packed(self) -> bool:
        return "cu_seqlens" in self.options

    def with_inputs(self, **inputs: Tensor) -> "Window":
        return replace(self, **inputs)

    def rows(self, x: Tensor) -> list[Tensor]:
        """Split a tensor laid out like the inputs into one ``[length, ...]`` tensor a row."""
        if not self.packed:
            return list(x)
        ends = self.options["cu_seqlens"].tolist()
        return [x[0, start:end] for start, end in pairwise(ends)]


def make_window(
    batch: int,
    window: int,
    *,
    heads: int = 2,
    value_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
    gate: str = "bounded",
    scalar_gate: bool = False,
    l2norm: bool = True,
    beta: str = "sigmoid",
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    lengths: list[int] | None = None,
    tail: int = 0,
    index_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Window:
    """Seeded inputs.

    Args:
        gate: "bounded", "unbounded" or "precomputed"; ``scalar_gate`` for one decay a head.
        l2norm: keys arrive raw and the kernel normalises; otherwise they arrive normalised.
        beta: "plain", "sigmoid" or "neg_eigval".
        gate_dtype: dtype of g and beta, where it is not ``dtype``.
        lengths: row lengths of a packed window; ``tail`` tokens that belong to no row follow.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    packed = lengths is not None
    lead = (1, sum(lengths) + tail) if packed else (batch, window)
    gate_dtype = dtype if gate_dtype is None else gate_dtype
    gate_shape = (value_heads,) if scalar_gate else (value_heads, key_dim)

    q, k, v = normal(*lead, heads, key_dim), normal(*lead, heads, key_dim), normal(*lead, value_heads, value_dim)
    if not l2norm:
        k = torch.nn.functional.normalize(k, dim=-1)
    g, b = normal(*lead, *gate_shape), normal(*lead, value_heads)
    options: dict = {"use_qk_l2norm_in_kernel": l2norm}
    if gate == "precomputed":
        g = -torch.nn.functional.softplus(g)
    else:
        options |= {
            "use_gate_in_kernel": True,
            "A_log": normal(value_heads).to(device),
            "dt_bias": normal(*gate_shape).to(device),
            "lower_bound": -5.0 if gate == "bounded" else None,
        }
    if beta == "plain":
        b = b.sigmoid()
    else:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": beta == "neg_eigval"}
    if packed:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        options |= {"cu_seqlens": ends.to(device, index_dtype), "max_seqlen": window}
    tensors = [x.to(device, dtype) for x in (q, k, v)] + [x.to(device, gate_dtype) for x in (g, b)]
    return Window(*tensors, options, lengths if packed else [window] * batch)


@dataclass
class Answer:
    """Per row, in float64 and in float32: ``o``, ``u`` ``[T, HV, V]`` and ``states [T + 1, HV, V, K]``."""

    rows64: list[tuple[Tensor, Tensor, Tensor]]
    rows32: list[tuple[Tensor, Tensor, Tensor]]

    def outputs(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([row[0] for row in rows]) for rows in (self.rows64, self.rows32))

    def corrections(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([row[1] for row in rows]) for rows in (self.rows64, self.rows32))

    def states(self, accepted) -> tuple[Tensor, Tensor]:
        """The states after ``accepted[b]`` tokens, clamped to each row."""
        return tuple(
            torch.stack([row[2][min(max(int(n), 0), len(row[2]) - 1)] for row, n in zip(rows, accepted, strict=True)])
            for rows in (self.rows64, self.rows32)
        )


def oracle(window: Window, initial_states) -> Answer:
    """The recurrence of every row, from ``initial_states[b]``, on the CPU."""
    settings = {name: window.options[name] for name in SETTINGS_OF_THE_ORACLE if name in window.options}
    settings = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in settings.items()}
    rows = [window.rows(x.detach().cpu()) for x in window.inputs]

    def run(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        states = [s.detach().cpu() for s in initial_states]
        return [recurrence(*row, s, dtype=dtype, **settings) for *row, s in zip(*rows, states, strict=True)]

    return Answer(run(torch.float64), run(torch.float32))

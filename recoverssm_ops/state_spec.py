"""How many bytes a request costs, and which of them are its state: sizes only, nothing is allocated here.

Two layouts of the same model. *plain* keeps one state per window position, so a request owns ``T = 1 + drafts`` slots.
*recoverssm* keeps one slot per request, and a compact record per window token while a step runs. docs/planner.md explains the
counting, design.md, section 2, the record.
"""

from dataclasses import dataclass, field
from math import prod

import torch


def expect_size(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} should be an int, but was {value!r}")
    if value < least:
        raise ValueError(f"{name} should be at least {least}, but was {value}")


def expect_dtype(name: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} should be a torch.dtype, but was {value!r}")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one linear attention layer of the whole model, before tensor parallelism shards its heads.

    Attributes:
        num_heads: H, heads of q and k.
        head_k_dim: K.
        num_value_heads: HV, a multiple of H; None: H.
        head_v_dim: V; None: K.
        conv_width: W of the short convolution, which keeps W-1 columns; None: the layer has none.
        conv_channels: D; None: q, k and v side by side, ``2*H*K + HV*V``.
        scalar_gate: one decay a head and token (gated delta rule) instead of K (Kimi Delta Attention).
        state_dtype: of the recurrent state. conv_dtype: of the conv state.

    Raises:
        ValueError, TypeError: a size below 1, value heads that are no multiple of the heads, no dtype.
    """

    num_heads: int
    head_k_dim: int
    num_value_heads: int | None = None
    head_v_dim: int | None = None
    conv_width: int | None = 4
    conv_channels: int | None = None
    scalar_gate: bool = False
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_k_dim"):
            expect_size(name, getattr(self, name))
        self._default("num_value_heads", self.num_heads)
        self._default("head_v_dim", self.head_k_dim)
        if self.num_value_heads % self.num_heads:
            raise ValueError(
                f"num_value_heads should be a multiple of num_heads {self.num_heads}, but was {self.num_value_heads}"
            )
        if self.conv_width is None:
            if self.conv_channels not in (None, 0):
                raise ValueError(f"conv_channels should be None without a conv_width, but was {self.conv_channels}")
            object.__setattr__(self, "conv_channels", 0)
        else:
            expect_size("conv_width", self.conv_width)
            self._default(
                "conv_channels", 2 * self.num_heads * self.head_k_dim + self.num_value_heads * self.head_v_dim
            )
        for name in ("state_dtype", "conv_dtype"):
            expect_dtype(name, getattr(self, name))

    def _default(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)
        expect_size(name, getattr(self, name))


@dataclass(frozen=True)
class StatePart:
    """One tensor of one layer, for one slot or one request: ``(slots, *shape)`` is the pool."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What one request costs on one rank. Every ``*_bytes`` but ``page_bytes`` is exact and counts all layers.

    Attributes:
        name: "plain" or "recoverssm".
        num_layers: linear attention layers.
        slots_per_request: states kept per request.
        state: the parts of one slot of one layer. They are a request's state: what is copied when the request moves and
            published for prefix caching (one slot, whatever ``slots_per_request``).
        transient: the parts of one request and layer that live from verify to commit. Never copied, moved or published;
            they may hold anything before a verify.
        alignment: bytes, a power of two.
    """

    name: str
    num_layers: int
    slots_per_request: int
    state: tuple[StatePart, ...]
    transient: tuple[StatePart, ...]
    alignment: int

    @property
    def slot_bytes(self) -> int:
        """One slot."""
        return self.num_layers * sum(part.nbytes for part in self.state)

    @property
    def state_bytes(self) -> int:
        """One request at rest."""
        return self.slots_per_request * self.slot_bytes

    @property
    def transient_bytes(self) -> int:
        """What one request needs besides while a step runs."""
        return self.num_layers * sum(part.nbytes for part in self.transient)

    @property
    def step_bytes(self) -> int:
        """One request while a step runs."""
        return self.state_bytes + self.transient_bytes

    def bytes_of(self, *names: str) -> int:
        """One request's bytes of the named parts: all layers, and all slots where the part is state."""
        unknown = set(names) - {part.name for part in self.state + self.transient}
        if unknown:
            raise KeyError(f"{self.name} has no part {', '.join(sorted(unknown))}")
        state = sum(part.nbytes for part in self.state if part.name in names)
        transient = sum(part.nbytes for part in self.transient if part.name in names)
        return self.num_layers * (self.slots_per_request * state + transient)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part starts in a page: the bytes of one slot of one layer, every part aligned."""
        offsets, end = {}, 0
        for part in self.state:
            offsets[part.name] = end
            end += _round_up(part.nbytes, self.alignment)
        return offsets

    @property
    def page_bytes(self) -> int:
        """One slot of one layer for an allocator that keeps its parts together; the slot stride of all pools then."""
        return sum(_round_up(part.nbytes, self.alignment) for part in self.state)


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """A model's state on one rank.

    Tensor parallelism shards the heads (and the conv channels with them), so a rank holds ``1 / tensor_parallel`` of every
    request. Data parallel attention replicates the layers: a rank holds the whole state of its own requests alone. Expert
    parallelism shards the experts and no state, so it has no field: an expert-parallel deployment with data parallel attention
    over 8 ranks is ``tensor_parallel=1, data_parallel=8``.

    Attributes:
        layer: sizes of every linear attention layer.
        num_layers: linear attention layers.
        window: T = 1 + drafts.
        tensor_parallel, data_parallel: ranks.
        activation_dtype: of q, k, v and of the convolution's inputs.
        gate_dtype: of g; None: ``activation_dtype``.
        alignment: bytes that parts of a page are aligned to, a power of two. 16 is what vector loads need.
        shard: the layer as one rank holds it (derived).

    Raises:
        ValueError, TypeError: a size below 1, an alignment that is no power of two, a dtype that is none, or a
            ``tensor_parallel`` that does not divide the heads.
    """

    layer: LayerShape
    num_layers: int
    window: int
    tensor_parallel: int = 1
    data_parallel: int = 1
    activation_dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype | None = None
    alignment: int = 16
    shard: LayerShape = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layer, LayerShape):
            raise TypeError(f"layer should be a LayerShape, but was {self.layer!r}")
        for name in ("num_layers", "window", "tensor_parallel", "data_parallel", "alignment"):
            expect_size(name, getattr(self, name))
        if self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment should be a power of two, but was {self.alignment}")
        if self.gate_dtype is None:
            object.__setattr__(self, "gate_dtype", self.activation_dtype)
        for name in ("activation_dtype", "gate_dtype"):
            expect_dtype(name, getattr(self, name))
        object.__setattr__(self, "shard", _shard(self.layer, self.tensor_parallel))

    @property
    def drafts(self) -> int:
        return self.window - 1

    def requests_per_rank(self, requests: int) -> int:
        """The most requests that one data parallel rank holds of ``requests`` spread evenly."""
        return -(-requests // self.data_parallel)

    def plain(self, *, conv_draft_columns: bool = True) -> Layout:
        """One state per window position.

        T slots per request, each with a recurrent state and a conv state, and nothing besides. ``conv_draft_columns``: the
        conv state has ``W-1 + drafts`` columns, since it takes in the whole window before it is known what is kept; this is
        how vLLM serves Kimi-K3. False: W-1 columns, as for a model whose slots each hold the history at their position.
        """
        conv = self._conv_state(self.drafts if conv_draft_columns else 0)
        return Layout("plain", self.num_layers, self.window, self._recurrent() + conv, (), self.alignment)

    def recoverssm(self) -> Layout:
        """One slot per request with W-1 conv columns; record (``u``, ``k``, ``g``) and conv inputs of the window are transient.

        ``u`` is the only tensor made for the record. ``k``, ``g`` and the conv inputs are the layer's own activations, counted
        because they stay alive until the commit, for all layers at once.
        """
        shard, T = self.shard, self.window
        gate = () if shard.scalar_gate else (shard.head_k_dim,)
        record = (
            StatePart("u", (T, shard.num_value_heads, shard.head_v_dim), torch.float32),
            StatePart("k", (T, shard.num_heads, shard.head_k_dim), self.activation_dtype),
            StatePart("g", (T, shard.num_value_heads, *gate), self.gate_dtype),
        )
        if shard.conv_width is not None:
            record += (StatePart("conv_inputs", (T, shard.conv_channels), self.activation_dtype),)
        state = self._recurrent() + self._conv_state(0)
        return Layout("recoverssm", self.num_layers, 1, state, record, self.alignment)

    def _recurrent(self) -> tuple[StatePart, ...]:
        shard = self.shard
        shape = (shard.num_value_heads, shard.head_v_dim, shard.head_k_dim)
        return (StatePart("recurrent", shape, shard.state_dtype),)

    def _conv_state(self, extra_columns: int) -> tuple[StatePart, ...]:
        shard = self.shard
        if shard.conv_width is None:
            return ()
        columns = shard.conv_width - 1 + extra_columns
        return (StatePart("conv", (shard.conv_channels, columns), shard.conv_dtype),)


def _shard(layer: LayerShape, tensor_parallel: int) -> LayerShape:
    """The layer as one tensor parallel rank holds it."""
    local = {}
    for name in ("num_heads", "num_value_heads", "conv_channels"):
        size = getattr(layer, name)
        if size % tensor_parallel:
            raise ValueError(
                f"tensor_parallel should divide {name} {size}, but was {tensor_parallel}: a rank holds whole heads, so use "
                f"one of {_divisors(layer)}, or data parallel attention (data_parallel)"
            )
        local[name] = size // tensor_parallel
    if layer.conv_width is None:
        local["conv_channels"] = None
    others = ("head_k_dim", "head_v_dim", "conv_width", "scalar_gate", "state_dtype", "conv_dtype")
    return LayerShape(**local, **{name: getattr(layer, name) for name in others})


def _divisors(layer: LayerShape) -> list[int]:
    return [n for n in range(1, layer.num_heads + 1) if layer.num_heads % n == 0 and layer.conv_channels % n == 0]


def _round_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment

"""The ways to write one speculative step of a linear attention layer that the pass has to recognise.

Every spelling computes the same thing (docs/design.md, section 2) and differs in how it is written: how the state meets the
key, how the states are put together and selected, where the inputs are normalised, where the checkpoint comes from.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOTS = 5
CHOICES = {
    "contraction": ("mul", "einsum", "matmul"),
    "update": ("delta", "scaled_keys", "matrix", "none"),
    "layout": ("value_first", "key_first"),
    "stacking": ("stack", "cat", "cat_view", "stack_last", "slices", "with_checkpoint", "slices_with_checkpoint"),
    "selection": ("index", "gather", "take_along_dim", "index_select", "where", "one_hot", "scalar"),
    "outputs": ("each", "slices", "joined", "last_unused"),
    "projection": ("separate", "packed", "grouped"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "pool_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "gate": ("bounded", "unbounded", "unbiased", "precomputed", "exp2", "scalar", "scalar_bounded", "none"),
    "l2norm": ("rsqrt", "normalize", "none"),
    "beta": ("sigmoid", "doubled", "raw"),
    "checkpoint": ("pool", "functional", "buffer"),
    "preprocessing": ("window", "window_exp", "step"),
    "T": (2, 3, 8),
    "B": (1, 3),
    "layers": (1, 2),
    "shapes": ("static", "batch_dynamic", "all_dynamic"),
}


@dataclass(frozen=True)
class Spelling:
    """One choice of everything; the defaults are the generic model's own."""

    contraction: str = "mul"
    update: str = "delta"
    layout: str = "value_first"
    stacking: str = "stack"
    selection: str = "index"
    outputs: str = "each"
    projection: str = "separate"
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    gate: str = "bounded"
    l2norm: str = "rsqrt"
    beta: str = "sigmoid"
    checkpoint: str = "pool"
    preprocessing: str = "window"
    T: int = 3
    B: int = 3
    layers: int = 1
    shapes: str = "static"
    H: int = 2
    K: int = 8
    V: int = 6
    lower_bound: float = -5.0

    def __str__(self) -> str:
        """What differs from the defaults."""
        default = Spelling()
        words = [
            f"{f.name}={getattr(self, f.name)}".replace("torch.", "")
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return ",".join(words) or "default"

    @property
    def flags(self) -> dict[str, bool]:
        """What the verify operator is expected to do itself."""
        # dynamic=True turns the Python float in a configuration into an input, and the operator wants a number.
        unknown_bound = self.shapes == "all_dynamic" and self.gate in ("bounded", "scalar_bounded")
        return {
            "use_qk_l2norm_in_kernel": self.l2norm == "rsqrt",
            "use_gate_in_kernel": self.gate not in ("precomputed", "exp2", "none") and not unknown_bound,
            "use_beta_sigmoid_in_kernel": self.beta != "raw",
            "allow_neg_eigval": self.beta == "doubled",
        }

    @property
    def form(self) -> str:
        """In place only where the pool is laid out as the operators have it, and some state is selected whatever happens."""
        in_place = self.checkpoint != "functional" and self.layout == "value_first" and self.selection != "one_hot"
        return "commit" if in_place else "recover"


def covering_sample(count: int, seed: int = 0) -> list[Spelling]:
    """``count`` spellings, chosen greedily so that as many pairs of choices as possible occur together."""
    rng = random.Random(seed)
    chosen: list[Spelling] = []
    covered: set = set()
    for _ in range(count):
        tries = [possible(Spelling(**{name: rng.choice(c) for name, c in CHOICES.items()})) for _ in range(60)]
        best = max(tries, key=lambda s: len(_pairs(s) - covered))
        covered |= _pairs(best)
        chosen.append(best)
    return chosen


def possible(s: Spelling) -> Spelling:
    """The spelling, or where its choices exclude each other one near it."""
    # A batch of one is no dynamic dimension to PyTorch, nor is one that take_along_dim has looked at.
    fixed = s.B == 1 or s.selection == "take_along_dim"
    s = replace(s, shapes="static") if fixed and s.shapes == "batch_dynamic" else s
    if s.selection == "index_select" and s.stacking == "stack_last":
        s = replace(s, stacking="stack")
    # One contraction over all states needs them together, and nothing but them.
    if s.outputs == "joined" and (s.selection == "where" or s.stacking not in ("stack", "cat", "slices")):
        s = replace(s, outputs="each")
    # A long window of several layers, or with symbolic sizes, only costs time.
    return replace(s, layers=1, shapes="static") if s.T > 3 else s


def _pairs(s: Spelling) -> set:
    return set(itertools.combinations([(name, getattr(s, name)) for name in CHOICES], 2))


def inputs(s: Spelling, seed: int = 0, device: torch.device | str = "cpu") -> tuple:
    """``(states, layers, slots, num_accepted)`` for :class:`Step`; one pool, or one state per row, a layer."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows = SLOTS if s.checkpoint == "pool" else s.B
    sizes = (s.V, s.K) if s.layout == "value_first" else (s.K, s.V)
    states = [rand(rows, s.H, *sizes, dtype=s.pool_dtype) for _ in range(s.layers)]
    key_heads = 1 if s.projection == "grouped" else s.H
    layers = []
    for _ in range(s.layers):
        g = rand(s.B, s.T, s.H, *(() if s.gate.startswith("scalar") else (s.K,)), dtype=s.dtype)
        layers.append(
            {
                "q": rand(s.B, s.T, key_heads, s.K, dtype=s.dtype),
                "k": rand(s.B, s.T, key_heads, s.K, dtype=s.dtype) * (0.4 if s.l2norm == "none" else 1),
                "v": rand(s.B, s.T, s.H, s.V, dtype=s.dtype),
                "g": -g.abs() if s.gate in ("precomputed", "exp2") else g,
                "beta": rand(s.B, s.T, s.H, dtype=s.dtype).sigmoid()
                if s.beta == "raw"
                else rand(s.B, s.T, s.H, dtype=s.dtype),
                "A_log": rand(s.H),
                "dt_bias": rand(s.H) if s.gate.startswith("scalar") else rand(s.H, s.K),
            }
        )
    slots = torch.randperm(SLOTS, generator=generator)[: s.B].to(device)
    num_accepted = torch.randint(1, s.T + 1, (s.B,), generator=generator).to(device)
    if s.selection == "scalar":
        num_accepted = num_accepted[:1].repeat(s.B)
    if s.shapes == "batch_dynamic":
        batched = [slots, num_accepted, *(layer[name] for layer in layers for name in ("q", "k", "v", "g", "beta"))]
        for x in batched + (states if s.checkpoint != "pool" else []):
            torch._dynamo.mark_dynamic(x, 0)
    return states, layers, slots, num_accepted


class Step(nn.Module):
    """The speculative step as this spelling writes it; ``compute`` float64 makes it its own oracle.

    Returns outputs ``[B, T, H, V]``, and for a functional checkpoint the new states too. A module, because PyTorch takes the
    integers that a module holds for constants, where those of a function become inputs under ``dynamic=True``.
    """

    def __init__(self, spelling: Spelling, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spelling, self.compute = spelling, compute

    def forward(self, states: list[Tensor], layers: list[dict[str, Tensor]], slots: Tensor, num_accepted: Tensor):
        s, compute = self.spelling, self.compute
        o, new_states = None, []
        for state, layer in zip(states, layers, strict=True):
            S = (state[slots] if s.checkpoint == "pool" else state).to(compute)
            # The next layer reads the layer before without any projection between: nothing may come apart there.
            v = layer["v"].to(compute) if o is None else o
            o, S0_and_states = _window(s, layer, v, S, compute)
            o, selected = _outputs_and_selection(s, o, S0_and_states, num_accepted)
            if s.checkpoint == "pool":
                state[slots] = selected.to(state.dtype)
            elif s.checkpoint == "buffer":
                state.copy_(selected)
            else:
                new_states.append(selected)
        return (o, new_states) if s.checkpoint == "functional" else o


def _window(s: Spelling, layer: dict[str, Tensor], v: Tensor, S: Tensor, compute: torch.dtype) -> tuple:
    """What the outputs are made of, and the states from the checkpoint on."""
    raw = {name: layer[name] for name in ("q", "k", "g", "beta")}
    if s.projection == "packed":
        qk = torch.cat([raw["q"], raw["k"]], -1)
        raw["q"], raw["k"] = qk.split(s.K, -1)
    elif s.projection == "grouped":
        raw["q"] = raw["q"].repeat_interleave(s.H, 2)
        raw["k"] = raw["k"].expand(-1, -1, s.H, -1)
    whole = None if s.preprocessing == "step" else _preprocess(s, layer, **raw, compute=compute)
    queries, states = [], [S]
    for t in range(s.T):
        if whole is None:
            q, k, decay, beta = _preprocess(s, layer, **{name: x[:, t] for name, x in raw.items()}, compute=compute)
        else:
            q, k, decay, beta = (None if x is None else x[:, t] for x in whole)
        if decay is not None:
            if s.preprocessing != "window_exp":
                decay = _exponential(s, decay)
            decay = decay[..., None] if s.gate.startswith("scalar") else decay
            S = S * decay.unsqueeze(_value_dim(s))
        S = _updated(s, S, k, v[:, t], beta)
        queries.append(q)
        states.append(S)
    return queries, states


def _outputs_and_selection(s: Spelling, queries: list[Tensor], states: list[Tensor], num_accepted: Tensor) -> tuple:
    if s.selection == "where":
        stacked, selected = None, states[1]
        for t in range(1, s.T):
            selected = torch.where((num_accepted > t).view(-1, 1, 1, 1), states[t + 1], selected)
    else:
        stacked = _stack(s, states)
        selected = _select(s, stacked, num_accepted)
    if s.outputs == "joined":
        o = torch.einsum("bthvk,bthk->bthv", _value_first(s, stacked), torch.stack(queries, 1))
    elif s.outputs == "slices":
        o = torch.zeros(queries[0].shape[0], s.T, s.H, s.V, dtype=queries[0].dtype, device=queries[0].device)
        for t, q in enumerate(queries):
            o[:, t] = _read(s, states[t + 1], q)
    else:
        last = torch.zeros_like if s.outputs == "last_unused" else lambda x: x
        outs = [_read(s, states[t + 1], q) for t, q in enumerate(queries)]
        o = torch.stack([*outs[:-1], last(outs[-1])], 1)
    return o, selected


def _exponential(s: Spelling, g: Tensor) -> Tensor:
    return torch.exp2(g * 1.4426950408889634) if s.gate == "exp2" else g.exp()


def _value_dim(s: Spelling) -> int:
    return -2 if s.layout == "value_first" else -1


def _value_first(s: Spelling, S: Tensor) -> Tensor:
    return S if s.layout == "value_first" else S.transpose(-1, -2)


def _updated(s: Spelling, S: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The decayed state after one token."""
    beta = beta.unsqueeze(-1)
    if s.update == "none":
        return S + _outer(s, beta * v, k)
    if s.update == "scaled_keys":
        return S + _outer(s, beta * v - _read(s, S, beta * k), k)
    if s.update == "matrix":
        forget = torch.eye(s.K, dtype=S.dtype, device=S.device) - (beta * k).unsqueeze(-1) * k.unsqueeze(-2)
        kept = S @ forget if s.layout == "value_first" else forget.transpose(-1, -2) @ S
        return kept + _outer(s, beta * v, k)
    return S + _outer(s, beta * (v - _read(s, S, k)), k)


def _preprocess(s: Spelling, layer: dict[str, Tensor], q, k, g, beta, compute: torch.dtype) -> tuple:
    """Normalised q and k, log decay (its exponential for ``window_exp``) and step size, of one token or of the window."""
    q, k, g, beta = (x.to(compute) for x in (q, k, g, beta))
    if s.l2norm == "rsqrt":
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    elif s.l2norm == "normalize":
        q, k = (F.normalize(x, dim=-1, eps=1e-6) for x in (q, k))
    q = q * s.K**-0.5
    A, dt_bias = layer["A_log"].to(compute).exp(), layer["dt_bias"].to(compute)
    A = A if s.gate.startswith("scalar") else A[:, None]
    if s.gate in ("bounded", "scalar_bounded"):
        g = s.lower_bound * torch.sigmoid(A * (g + dt_bias))
    elif s.gate == "unbiased":
        g = -A * F.softplus(g)
    elif s.gate in ("unbounded", "scalar"):
        g = -A * F.softplus(g + dt_bias)
    if s.beta != "raw":
        beta = torch.sigmoid(beta) * (2 if s.beta == "doubled" else 1)
    if s.gate == "none":
        return q, k, None, beta
    return q, k, _exponential(s, g) if s.preprocessing == "window_exp" else g, beta


def _read(s: Spelling, S: Tensor, x: Tensor) -> Tensor:
    if s.contraction == "einsum":
        return torch.einsum("bhvk,bhk->bhv" if s.layout == "value_first" else "bhkv,bhk->bhv", S, x)
    if s.layout == "key_first":
        return (S * x.unsqueeze(-1)).sum(-2) if s.contraction == "mul" else (x.unsqueeze(-2) @ S).squeeze(-2)
    return (S * x.unsqueeze(-2)).sum(-1) if s.contraction == "mul" else (S @ x.unsqueeze(-1)).squeeze(-1)


def _outer(s: Spelling, u: Tensor, k: Tensor) -> Tensor:
    row, column = (u, k) if s.layout == "value_first" else (k, u)
    if s.contraction == "mul":
        return row.unsqueeze(-1) * column.unsqueeze(-2)
    if s.contraction == "einsum":
        return torch.einsum("bhi,bhj->bhij", row, column)
    return row.unsqueeze(-1) @ column.unsqueeze(-2)


def _stack(s: Spelling, states: list[Tensor]) -> Tensor:
    """The states after each token; the checkpoint before them where the spelling says so."""
    S0, *states = states
    if s.stacking == "stack":
        return torch.stack(states, 1)
    if s.stacking == "stack_last":
        return torch.stack(states, -1)
    if s.stacking == "cat":
        return torch.cat([S.unsqueeze(1) for S in states], 1)
    if s.stacking == "with_checkpoint":
        return torch.cat([S0.unsqueeze(1), torch.stack(states, 1)], 1)
    if s.stacking == "cat_view":
        return torch.cat(states, 1).view(-1, len(states), *states[0].shape[1:])
    states = [S0, *states] if s.stacking == "slices_with_checkpoint" else states
    whole = torch.empty(S0.shape[0], len(states), *S0.shape[1:], dtype=S0.dtype, device=S0.device)
    for t, S in enumerate(states):
        whole[:, t] = S
    return whole


def _select(s: Spelling, states: Tensor, num_accepted: Tensor) -> Tensor:
    position = num_accepted if s.stacking.endswith("with_checkpoint") else num_accepted - 1
    dim = -1 if s.stacking == "stack_last" else 1
    B, T = states.shape[0], states.shape[dim]
    rows = torch.arange(B, device=states.device)
    if s.selection == "scalar":
        return states.select(dim, position[0].item())
    if s.selection == "index":
        return states[rows, position] if dim == 1 else states[rows, ..., position]
    one_each = position.view(-1, 1, 1, 1, 1)
    if s.selection == "gather":
        sizes = [-1, *(1 if d == dim % 5 else states.shape[d] for d in range(1, 5))]  # the positions may be fewer
        return states.gather(dim, one_each.expand(sizes)).squeeze(dim)
    if s.selection == "take_along_dim":
        return torch.take_along_dim(states, one_each, dim).squeeze(dim)
    if s.selection == "one_hot":
        weights = F.one_hot(position, T).to(states.dtype)
        return torch.einsum("bt,bthvk->bhvk" if dim == 1 else "bt,bhvkt->bhvk", weights, states)
    if s.B == 1:
        return states.index_select(1, position).squeeze(1)
    return states.flatten(0, 1).index_select(0, rows * T + position)

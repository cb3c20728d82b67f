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
    "stacking": ("stack", "cat", "cat_view"),
    "selection": ("index", "gather", "take_along_dim", "index_select"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "pool_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "gate": ("bounded", "unbounded", "precomputed", "scalar", "scalar_bounded", "none"),
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
    stacking: str = "stack"
    selection: str = "index"
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
            "use_gate_in_kernel": self.gate not in ("precomputed", "none") and not unknown_bound,
            "use_beta_sigmoid_in_kernel": self.beta != "raw",
            "allow_neg_eigval": self.beta == "doubled",
        }


def covering_sample(count: int, seed: int = 0) -> list[Spelling]:
    """``count`` spellings, chosen greedily so that as many pairs of choices as possible occur together."""
    rng = random.Random(seed)
    chosen: list[Spelling] = []
    covered: set = set()
    for _ in range(count):
        tries = [_possible(Spelling(**{name: rng.choice(c) for name, c in CHOICES.items()})) for _ in range(60)]
        best = max(tries, key=lambda s: len(_pairs(s) - covered))
        covered |= _pairs(best)
        chosen.append(best)
    return chosen


def _possible(s: Spelling) -> Spelling:
    # A batch of one is no dynamic dimension to PyTorch, nor is one that take_along_dim has looked at.
    fixed = s.B == 1 or s.selection == "take_along_dim"
    s = replace(s, shapes="static") if fixed and s.shapes == "batch_dynamic" else s
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
    states = [rand(rows, s.H, s.V, s.K, dtype=s.pool_dtype) for _ in range(s.layers)]
    layers = []
    for _ in range(s.layers):
        g = rand(s.B, s.T, s.H, *(() if s.gate.startswith("scalar") else (s.K,)), dtype=s.dtype)
        layers.append(
            {
                "q": rand(s.B, s.T, s.H, s.K, dtype=s.dtype),
                "k": rand(s.B, s.T, s.H, s.K, dtype=s.dtype) * (0.4 if s.l2norm == "none" else 1),
                "v": rand(s.B, s.T, s.H, s.V, dtype=s.dtype),
                "g": -g.abs() if s.gate == "precomputed" else g,
                "beta": rand(s.B, s.T, s.H, dtype=s.dtype).sigmoid()
                if s.beta == "raw"
                else rand(s.B, s.T, s.H, dtype=s.dtype),
                "A_log": rand(s.H),
                "dt_bias": rand(s.H) if s.gate.startswith("scalar") else rand(s.H, s.K),
            }
        )
    slots = torch.randperm(SLOTS, generator=generator)[: s.B].to(device)
    num_accepted = torch.randint(1, s.T + 1, (s.B,), generator=generator).to(device)
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
            o, window_states = _window(s, layer, v, S, compute)
            selected = _select(s, window_states, num_accepted)
            if s.checkpoint == "pool":
                state[slots] = selected.to(state.dtype)
            elif s.checkpoint == "buffer":
                state.copy_(selected)
            else:
                new_states.append(selected)
        return (o, new_states) if s.checkpoint == "functional" else o


def _window(s: Spelling, layer: dict[str, Tensor], v: Tensor, S: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    raw = {name: layer[name] for name in ("q", "k", "g", "beta")}
    whole = None if s.preprocessing == "step" else _preprocess(s, layer, **raw, compute=compute)
    outs, states = [], []
    for t in range(s.T):
        if whole is None:
            q, k, decay, beta = _preprocess(s, layer, **{name: x[:, t] for name, x in raw.items()}, compute=compute)
        else:
            q, k, decay, beta = (None if x is None else x[:, t] for x in whole)
        if decay is not None:
            if s.preprocessing != "window_exp":
                decay = decay.exp()
            S = S * (decay[..., None, None] if s.gate.startswith("scalar") else decay.unsqueeze(-2))
        u = beta.unsqueeze(-1) * (v[:, t] - _read(s, S, k))
        S = S + _outer(s, u, k)
        outs.append(_read(s, S, q))
        states.append(S)
    return torch.stack(outs, 1), _stack(s, states)


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
    elif s.gate in ("unbounded", "scalar"):
        g = -A * F.softplus(g + dt_bias)
    if s.beta != "raw":
        beta = torch.sigmoid(beta) * (2 if s.beta == "doubled" else 1)
    if s.gate == "none":
        return q, k, None, beta
    return q, k, g.exp() if s.preprocessing == "window_exp" else g, beta


def _read(s: Spelling, S: Tensor, x: Tensor) -> Tensor:
    if s.contraction == "mul":
        return (S * x.unsqueeze(-2)).sum(-1)
    if s.contraction == "einsum":
        return torch.einsum("bhvk,bhk->bhv", S, x)
    return (S @ x.unsqueeze(-1)).squeeze(-1)


def _outer(s: Spelling, u: Tensor, k: Tensor) -> Tensor:
    if s.contraction == "mul":
        return u.unsqueeze(-1) * k.unsqueeze(-2)
    if s.contraction == "einsum":
        return torch.einsum("bhv,bhk->bhvk", u, k)
    return u.unsqueeze(-1) @ k.unsqueeze(-2)


def _stack(s: Spelling, states: list[Tensor]) -> Tensor:
    if s.stacking == "stack":
        return torch.stack(states, 1)
    if s.stacking == "cat":
        return torch.cat([S.unsqueeze(1) for S in states], 1)
    return torch.cat(states, 1).view(-1, len(states), *states[0].shape[1:])


def _select(s: Spelling, states: Tensor, num_accepted: Tensor) -> Tensor:
    position = num_accepted - 1
    B, T = states.shape[:2]
    rows = torch.arange(B, device=states.device)
    if s.selection == "index":
        return states[rows, position]
    if s.selection == "gather":
        index = position.view(-1, 1, 1, 1, 1).expand(-1, 1, *states.shape[2:])
        return states.gather(1, index).squeeze(1)
    if s.selection == "take_along_dim":
        return torch.take_along_dim(states, position.view(-1, 1, 1, 1, 1), 1).squeeze(1)
    if s.B == 1:
        return states.index_select(1, position).squeeze(1)
    return states.flatten(0, 1).index_select(0, rows * T + position)

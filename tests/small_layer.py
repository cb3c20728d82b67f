"""One small layer with a pool, and look-alikes that are refused: for tests of what the pass says rather than what it finds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def make_inputs(B: int = 3, T: int = 3, H: int = 2, K: int = 8, V: int = 6) -> tuple[Tensor, ...]:
    """``(pool, slots, q, k, v, g, beta, num_accepted)``."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pool, slots = rand(5, H, V, K), torch.randperm(5, generator=generator)[:B]
    q, k, v = rand(B, T, H, K), rand(B, T, H, K) * 0.4, rand(B, T, H, V)
    g, beta = -rand(B, T, H, K).abs(), rand(B, T, H).sigmoid()
    return pool, slots, q, k, v, g, beta, torch.randint(1, T + 1, (B,), generator=generator)


def token(S, q, k, v, g, beta):
    S = S * g.exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v - (S * k.unsqueeze(-2)).sum(-1))
    S = S + u.unsqueeze(-1) * k.unsqueeze(-2)
    return S, (S * q.unsqueeze(-2)).sum(-1)


def select(states, n):
    return states[torch.arange(states.shape[0], device=states.device), n - 1]


def layer(token: Callable = token, finish: Callable = select, between: Callable = lambda S: S) -> Callable:
    """The layer around one token; ``finish`` returns the selected state, or that and something else."""

    def run(pool, slots, q, k, v, g, beta, n):
        S, outs, states = pool[slots], [], []
        for t in range(q.shape[1]):
            S, o = token(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
            outs.append(o)
            states.append(between(S))
        selected = finish(torch.stack(states, 1), n)
        selected, extra = selected if isinstance(selected, tuple) else (selected, None)
        pool[slots] = selected
        return torch.stack(outs, 1), extra

    return run


STATE_RETURNED = layer(finish=lambda states, n: (select(states, n), states[:, 0] * 1))  # state_escapes
MEAN_OF_STATES = layer(finish=lambda states, n: states.mean(1))  # state_escapes

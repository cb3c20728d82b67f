"""The layer that the corpora of look-alikes and layouts change one thing of, written as plainly as it can be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

B, T, H, K, V, SLOTS = 3, 3, 2, 8, 6, 5


def make_inputs(B=B, T=T, H=H, K=K, V=V, dtype=torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    pool, slots = rand(SLOTS, H, V, K), torch.randperm(SLOTS, generator=generator)[:B]
    q, k, v = rand(B, T, H, K), rand(B, T, H, K) * 0.4, rand(B, T, H, V)
    g, beta = -rand(B, T, H, K).abs(), rand(B, T, H).sigmoid()
    return pool, slots, q, k, v, g, beta, torch.randint(1, T + 1, (B,), generator=generator)


def decay(S, g):
    return S * g.exp().unsqueeze(-2)


def correction(S, k, v, beta):
    return beta.unsqueeze(-1) * (v - (S * k.unsqueeze(-2)).sum(-1))


def write(S, u, k):
    return S + u.unsqueeze(-1) * k.unsqueeze(-2)


def read(S, q):
    return (S * q.unsqueeze(-2)).sum(-1)


def plain_step(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


def select(states, n):
    return states[torch.arange(states.shape[0], device=states.device), n - 1]


def layer(step: Callable = plain_step, *, finish: Callable = select, start: Callable = torch.Tensor.float) -> Callable:
    """The layer around one step; ``step`` may look at the whole window through ``.window`` and ``.t``."""

    def run(pool, slots, q, k, v, g, beta, n):
        S, outs, states = start(pool[slots]), [], []
        for t in range(q.shape[1]):
            more = {"t": t, "window": (q, k, v, g, beta), "outs": outs} if hasattr(step, "looks_around") else {}
            S, o = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], **more)
            outs.append(o)
            states.append(S)
        selected = finish(torch.stack(states, 1), n)
        extra = None
        if isinstance(selected, tuple):
            selected, extra = selected
        pool[slots] = selected.to(pool.dtype)
        return torch.stack(outs, 1), extra

    return run


def looks_around(step: Callable) -> Callable:
    step.looks_around = True
    return step

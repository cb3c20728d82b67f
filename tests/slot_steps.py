"""Steps that store the state after every position, in the ways there are to write them, and traffic for them."""

from __future__ import annotations

import random

import torch
from plain_layers import plain_step
from rewriting import assert_within_budget
from torch import Tensor
from torch._higher_order_ops.scan import scan

from compile_passes import slot_step

B, T, H, K, V, SLOTS = 3, 3, 2, 8, 6, 20


def make_inputs(seed: int, B: int = B, T: int = T, dtype=torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    g = -rand(B, T, H, K).abs()
    return rand(B, T, H, K), rand(B, T, H, K) * 0.4, rand(B, T, H, V), g, rand(B, T, H).sigmoid()


def make_table(seed: int, B: int = B, W: int = T) -> Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: B * W].view(B, W)


def window(S, q, k, v, g, beta):
    outs, states = [], []
    for t in range(q.shape[1]):
        S, o = plain_step(S, *(x[:, t].to(S.dtype) for x in (q, k, v, g, beta)))
        outs.append(o)
        states.append(S)
    return torch.stack(outs, 1), states


def scanned(S, q, k, v, g, beta):
    def body(S, x):
        S, o = plain_step(S, *x)
        return S, (S.clone(), o)

    _, (states, o) = scan(body, S, tuple(x.transpose(0, 1) for x in (q, k, v, g, beta)))
    return o.transpose(0, 1), [states[t] for t in range(q.shape[1])]


def read_index(pool, table, n):
    return pool[table[torch.arange(table.shape[0], device=table.device), n - 1]]


def read_take_along(pool, table, n):
    return pool[table.take_along_dim((n - 1)[:, None], 1)[:, 0]]


def read_gather(pool, table, n):
    return pool.index_select(0, table.gather(1, (n - 1).unsqueeze(1)).squeeze(1))


def read_flat(pool, table, n):
    return pool[table.reshape(-1)[torch.arange(table.shape[0], device=table.device) * table.shape[1] + n - 1]]


def write_whole(pool, table, states):
    pool[table[:, : len(states)]] = torch.stack(states, 1).to(pool.dtype)


def write_each(pool, table, states):
    for t, S in enumerate(states):
        pool[table[:, t]] = S.to(pool.dtype)


def write_flat(pool, table, states):
    pool[table[:, : len(states)].reshape(-1)] = torch.stack(states, 1).flatten(0, 1).to(pool.dtype)


def write_token_first(pool, table, states):
    pool[table[:, : len(states)].t()] = torch.stack(states).to(pool.dtype)


def write_with_index_put(pool, table, states):
    pool.index_put_((table[:, : len(states)].t().reshape(-1),), torch.cat(states).to(pool.dtype))


def make_step(read=read_index, write=write_whole, window=window, compute=torch.float32):
    def step(pool, table, n, *inputs):
        o, states = window(read(pool, table, n).to(compute), *(x.to(compute) for x in inputs))
        write(pool, table, states)
        return o

    return step


class Both:
    """A step, the same rewritten, and the same in float64, each on its own pool."""

    def __init__(self, step, oracle=None, dtype=torch.float32, **options):
        self.rewritten = slot_step(step, **{"backend": None, **options})
        pool = torch.randn(SLOTS, H, V, K, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.pool, self.plain_pool, self.exact_pool = pool.clone(), pool.clone(), pool.double()
        self.plain, self.exact = step, oracle or make_step(compute=torch.float64)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """As a prefill does."""
        for pool in (self.pool, self.plain_pool, self.exact_pool):
            pool[slots] = states.to(pool.dtype)

    def run(self, table: Tensor, n: Tensor, inputs: tuple, rows: slice | Tensor = slice(None)) -> None:
        results = [
            step(pool, table, n, *inputs)[rows]
            for step, pool in (
                (self.rewritten, self.pool),
                (self.plain, self.plain_pool),
                (self.exact, self.exact_pool),
            )
        ]
        assert results[0].dtype == results[1].dtype
        assert_within_budget(*results, f"outputs at {n.tolist()}")

    def settle(self, table: Tensor, n: Tensor, inputs: tuple) -> None:
        self.rewritten.settle(self.pool, table, n, *inputs)
        first, accepted = table[:, 0], table[torch.arange(table.shape[0], device=table.device), n - 1]
        assert_within_budget(self.pool[first], self.plain_pool[accepted], self.exact_pool[accepted], "settled")


class Requests:
    """Random traffic: requests come (a prefill writes slot 0 of theirs), take part in some steps, go, and free their slots."""

    def __init__(self, both: Both, width: int, seed: int):
        self.both, self.width, self.rng = both, width, random.Random(seed)
        self.free = list(range(1, SLOTS))  # slot 0 is nobody's: padding
        self.live: list[tuple[list[int], int]] = []

    def batch(self, size: int) -> tuple[Tensor, Tensor, list]:
        rng = self.rng
        for _ in range(2):
            if self.live and rng.random() < 0.3:
                self.free += self.live.pop(rng.randrange(len(self.live)))[0]
            if len(self.free) >= self.width and rng.random() < 0.7:
                slots = [self.free.pop(rng.randrange(len(self.free))) for _ in range(self.width)]
                generator = torch.Generator().manual_seed(rng.randrange(1000))
                self.both.write(torch.tensor(slots[:1]), torch.randn(1, H, V, K, generator=generator))
                self.live.append((slots, 1))
        rng.shuffle(self.live)
        chosen = self.live[:size]
        rows = chosen + [([0] * self.width, 1)] * (size - len(chosen))
        return torch.tensor([slots for slots, _ in rows]), torch.tensor([n for _, n in rows]), chosen

    def accept(self, chosen: list, window: int) -> None:
        self.live = [
            (slots, self.rng.randint(1, window)) if (slots, n) in chosen else (slots, n) for slots, n in self.live
        ]

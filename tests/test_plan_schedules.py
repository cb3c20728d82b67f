"""Align-mode prefix caching over many windows: closed blocks hold the oracle's states, and keep their bits forever."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from budget import assert_within_budget
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pools import bits, make_window
from torch import Tensor

import recoverssm_ops as rs
from recoverssm_ops.reference import recurrence

HV, V, K = 1, 3, 4
DTYPES = (torch.float64, torch.float32)


@dataclass
class Request:
    """What the oracle knows: the states after ``computed`` tokens, and after each closed block."""

    computed: int
    slots: list[int]
    now: tuple[Tensor, Tensor]
    closed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # block to states


class Cache:
    """A pool of state blocks. Every slot that is handed out is full of NaN; closed ones are watched."""

    def __init__(self, slots: int, device, rng: random.Random) -> None:
        self.state = torch.full((slots, HV, V, K), float("nan"), device=device)
        self.free = list(range(slots))
        rng.shuffle(self.free)
        self.published: dict[int, Tensor] = {}  # slot to the bits that it got when it was closed
        self.expected: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

    def allocate(self, request: Request, blocks: int) -> None:
        while len(request.slots) < blocks:
            request.slots.append(self.free.pop())
            self.state[request.slots[-1]] = float("nan")

    def publish(self, slot: int, states: tuple[Tensor, Tensor]) -> None:
        assert slot not in self.published
        self.published[slot] = bits(self.state[slot]).clone()
        self.expected.append((self.state[slot].clone(), states))

    def release(self, request: Request) -> None:
        for slot in request.slots:
            if slot not in self.published:
                self.free.append(slot)

    def check_published(self) -> None:
        if self.published:
            now = bits(self.state[list(self.published)]).view(len(self.published), -1)
            assert torch.equal(now, torch.stack(list(self.published.values())).view(now.shape))


def admit(cache: Cache, rng: random.Random, block_size: int, others: list[Request]) -> Request:
    """A new request: from the start, from a random state just before some boundary, or from another's closed blocks."""
    sharing = [r for r in others if r.closed]
    if sharing and rng.random() < 0.5:
        other = rng.choice(sharing)
        block = rng.choice(sorted(other.closed))
        shared = {b: states for b, states in other.closed.items() if b <= block}
        return Request((block + 1) * block_size, other.slots[: block + 1], other.closed[block], shared)
    computed = 0 if rng.random() < 0.3 else max(0, rng.randrange(1, 4) * block_size - rng.randrange(0, 20))
    blocks = max(1, -(-computed // block_size))
    state = torch.randn(HV, V, K, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    request = Request(computed, [], (state.double(), state))
    cache.allocate(request, blocks)
    for slot in request.slots[: computed // block_size]:
        cache.state[slot] = torch.randn(HV, V, K, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    cache.state[request.slots[-1]] = state
    for slot in request.slots[: computed // block_size]:  # they were closed before: watched, and compared with nobody
        cache.published[slot] = bits(cache.state[slot]).clone()
    if computed and computed % block_size == 0:
        request.closed[blocks - 1] = request.now
    return request


def run_schedule(
    device, block_size: int, T: int, rows: int, windows: int, seed: int, packed: bool, tight: bool
) -> Cache:
    """``tight``: no block beyond the committed tokens is allocated; otherwise all that the window may enter are."""
    rng = random.Random(seed)
    cache = Cache(rows * (windows + 2) * (T // block_size + 8), device, rng)
    requests = [admit(cache, rng, block_size, []) for _ in range(rows)]
    table_width = (4 * block_size + (windows + 1) * T) // block_size + 2
    for step in range(windows):
        for b in range(rows):
            if rng.random() < 0.05:
                cache.release(requests[b])
                requests[b] = admit(cache, rng, block_size, requests[:b] + requests[b + 1 :])
        active = [rng.random() < 0.9 for _ in range(rows)]
        lengths = [rng.randint(0, T) for _ in range(rows)] if packed else None
        accepted = [rng.choice([0, T, rng.randint(0, T)]) for _ in range(rows)]
        kept = [min(n, lengths[b]) if packed else n for b, n in enumerate(accepted)]
        table, computed = [], []
        for b, request in enumerate(requests):
            if active[b]:
                cache.allocate(request, -(-(request.computed + (kept[b] if tight else T)) // block_size))
            row = request.slots if active[b] else []
            table.append(row + [-1] * (table_width - len(row)))
            computed.append(request.computed if active[b] else rng.choice([0, 12345]))
            accepted[b] = accepted[b] if active[b] or packed else 0

        window = make_window(
            rows, T, heads=HV, value_heads=HV, key_dim=K, value_dim=V, lengths=lengths, device=device,
            gate=rng.choice(["bounded", "precomputed"]), seed=rng.randrange(2**31),
        )  # fmt: skip
        accepted_, computed_, table_ = (torch.tensor(x, device=device) for x in (accepted, computed, table))
        cu_seqlens = window.options.get("cu_seqlens")
        source = rs.CommitPlan.aligned_source(computed_, table_, block_size)
        plan = rs.CommitPlan.aligned(accepted_, computed_, table_, block_size, T, cu_seqlens=cu_seqlens)
        assert torch.equal(plan.source, source)
        before = bits(cache.state).clone()
        _, record = rs.kda_verify(*window.inputs, cache.state, source, **window.options)
        assert torch.equal(bits(cache.state), before)
        rs.kda_commit(cache.state, record, None, plan=plan)
        cache.check_published()

        untouched = before.view(len(cache.state), -1) == bits(cache.state).view(len(cache.state), -1)
        written = set((~untouched.all(1)).nonzero().flatten().tolist())
        options = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in window.options.items()}
        options = {k: x for k, x in options.items() if k not in ("cu_seqlens", "max_seqlen")}
        inputs = [window.rows(x.cpu()) for x in window.inputs]
        for b, request in enumerate(requests):
            n = kept[b]
            if not active[b] or n == 0:
                continue
            row = [x[b][:n] for x in inputs]
            states = [recurrence(*row, s, dtype=d, **options)[2] for s, d in zip(request.now, DTYPES, strict=True)]
            first, last = request.computed // block_size, (request.computed + n - 1) // block_size
            request.computed += n
            request.now = (states[0][n], states[1][n])
            for block in range(first, last + 1):
                written.discard(request.slots[block])
                closes = n - (request.computed - (block + 1) * block_size)
                if closes <= n:
                    request.closed[block] = (states[0][closes], states[1][closes])
                    cache.publish(request.slots[block], request.closed[block])
            live = cache.state[request.slots[last]].clone()
            if step % 8 == 7:
                cache.expected.append((live, request.now))
        assert not written, f"step {step} wrote slots {sorted(written)} of nobody"
    return cache


def check(cache: Cache) -> None:
    cache.check_published()
    if cache.expected:
        actual, states = zip(*cache.expected, strict=True)
        oracle64, low32 = (torch.stack(x) for x in zip(*states, strict=True))
        assert_within_budget(torch.stack(actual).cpu(), oracle64, low32, name=f"{len(actual)} states")


@settings(max_examples=30)
@given(
    block_size=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 256, 2048]),
    T=st.integers(1, 16),
    rows=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    packed=st.booleans(),
    tight=st.booleans(),
)
@example(block_size=1, T=16, rows=3, seed=0, packed=False, tight=True)
@example(block_size=2048, T=8, rows=4, seed=1, packed=True, tight=True)
@example(block_size=2048, T=4, rows=4, seed=2, packed=False, tight=False)
@example(block_size=3, T=8, rows=2, seed=3, packed=True, tight=False)
def any_schedule(device, block_size, T, rows, seed, packed, tight):
    check(run_schedule(device, block_size, T, rows, 12, seed, packed, tight))


def test_b19_published_states_are_right_and_immutable(device):
    """Random acceptance, requests that come, go and share prefixes, padding rows, tight or generous allocation."""
    any_schedule(device)


@pytest.mark.parametrize("block_size, T, closed", [(1, 4, 300), (4, 8, 150), (16, 5, 25), (64, 16, 10)])
def test_b19_long_schedules(device, block_size, T, closed):
    """A hundred windows of two requests, and at least ``closed`` blocks published."""
    cache = run_schedule(device, block_size, T, 2, 100, seed=block_size, packed=False, tight=True)
    check(cache)
    assert len(cache.published) >= closed


def test_b18_b19_one_window_closes_several_shared_blocks(device):
    """Two requests continue from one published block, which neither of them writes; both close their own after it."""
    T, block_size = 8, 3
    state = torch.randn(8, HV, V, K, generator=torch.Generator().manual_seed(0)).to(device)
    state[1:] = float("nan")
    before = bits(state[0]).clone()
    window = make_window(2, T, heads=HV, value_heads=HV, key_dim=K, value_dim=V, device=device)
    computed = torch.tensor([3, 3], device=device)
    table = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]], device=device)
    source = rs.CommitPlan.aligned_source(computed, table, block_size)
    _, record = rs.kda_verify(*window.inputs, state, source, **window.options)
    plan = rs.CommitPlan.aligned(torch.tensor([8, 4], device=device), computed, table, block_size, T)
    initial = state[:1].cpu()
    rs.kda_commit(state, record, None, plan=plan)
    assert torch.equal(bits(state[0]), before)
    for row, writes in enumerate(({1: 3, 2: 6, 3: 8}, {4: 3, 5: 4})):
        inputs = [x[row].cpu() for x in window.inputs]
        options = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in window.options.items()}
        states = [recurrence(*inputs, initial[0], dtype=d, **options)[2] for d in DTYPES]
        for slot, n in writes.items():
            assert_within_budget(state[slot].cpu(), states[0][n], states[1][n], name=f"slot {slot}")
    assert state[[6, 7]].isnan().all()

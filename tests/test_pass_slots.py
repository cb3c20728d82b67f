"""``slot_step``: the states of every position are stored, and the next step begins with the accepted one."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from plain_layers import plain_step
from rewriting import assert_within_budget, copied
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import recoverssm_ops.ops as ops
from compile_passes import explain, slot_step

B, T, H, K, V, SLOTS = 3, 3, 2, 8, 6, 20


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def make_inputs(seed: int, B: int = B, T: int = T, dtype=torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    g = -rand(B, T, H, K).abs()
    return rand(B, T, H, K), rand(B, T, H, K) * 0.4, rand(B, T, H, V), g, rand(B, T, H).sigmoid()


def make_table(seed: int, B: int = B, W: int = T) -> Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[: B * W].view(B, W)


# --- the ways to write it -----------------------------------------------------------------------------------------------


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
    return pool[table[torch.arange(table.shape[0]), n - 1]]


def read_take_along(pool, table, n):
    return pool[table.take_along_dim((n - 1)[:, None], 1)[:, 0]]


def read_gather(pool, table, n):
    return pool.index_select(0, table.gather(1, (n - 1).unsqueeze(1)).squeeze(1))


def read_flat(pool, table, n):
    return pool[table.reshape(-1)[torch.arange(table.shape[0]) * table.shape[1] + n - 1]]


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


READS = [read_take_along, read_gather, read_flat]
WRITES = [write_whole, write_each, write_flat, write_token_first, write_with_index_put]
SPELLINGS = [*((read, write_whole) for read in READS), *((read_index, write) for write in WRITES)]


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
        first, accepted = table[:, 0], table[torch.arange(table.shape[0]), n - 1]
        assert_within_budget(self.pool[first], self.plain_pool[accepted], self.exact_pool[accepted], "settled")


@pytest.mark.parametrize(("read", "write"), SPELLINGS, ids=lambda f: f.__name__)
def test_several_steps_equal_the_plain_step(read, write):
    both, table, n = Both(make_step(read, write)), make_table(1), torch.ones(B, dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)
    for i in range(6):
        both.run(table, n, make_inputs(i))
        n = torch.randint(1, T + 1, (B,), generator=generator)
    both.settle(table, n, make_inputs(0))
    (layer,) = both.rewritten.report.layers
    assert layer.form == "commit" and layer.source.startswith("test_pass_slots.py:")


def test_only_the_first_column_is_written_and_the_pool_may_hold_no_other():
    both, n = Both(make_step()), torch.ones(B, dtype=torch.int64)
    table = torch.tensor([[4, 100, 101], [0, 102, 103], [2, 104, 105]])
    both.pool = both.pool[:5].clone()
    before, wide = both.pool.clone(), torch.randn(106, H, V, K)
    wide[:5] = before
    both.plain_pool, both.exact_pool = wide.clone(), wide.double()
    for i in range(4):
        both.run(table, n, make_inputs(i))
        n = 1 + (n + torch.arange(B)) % T
    assert torch.equal(both.pool[[1, 3]], before[[1, 3]]) and not torch.equal(both.pool[0], before[0])
    graph = both.rewritten._graphs[0].run[0].graph
    commits = graph.find_nodes(op="call_function", target=ops.kda_commit)
    assert len(commits) == 2 and all(node.args[0].op == "placeholder" for node in commits)
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    states = H * V * K * B * T
    assert max(n.meta["val"].numel() for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)) < states


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


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [(torch.float32, 15), (torch.bfloat16, 15), pytest.param(torch.float32, 300, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_requests_that_come_and_go(dtype, steps):
    """Rows change places, slots change owners, some rows are padding, windows are shorter than the table is wide."""
    both = Both(make_step(), dtype=dtype)
    requests, seen = Requests(both, width=4, seed=2), set()
    for i in range(steps):
        window = (2, 3, 4)[i // 2 % 3]
        table, n, chosen = requests.batch(3)
        seen.update(n.tolist())
        # Padding rows share a slot: which of them writes it last is left open.
        both.run(table, n, make_inputs(i, T=window), rows=slice(len(chosen) or None))
        requests.accept(chosen, window)
    assert seen == {1, 2, 3, 4} and len(both.rewritten._graphs) == 3


def test_dynamic_batch_takes_one_graph():
    both = Both(make_step(write=write_each), dynamic=True)
    for i, batch in enumerate((3, 2, 4)):
        table, n = make_table(3, 4)[:batch], torch.full((batch,), 1 if i == 0 else 2)
        both.write(table[:, 0], torch.randn(batch, H, V, K, generator=torch.Generator().manual_seed(i)))
        both.run(table, torch.ones_like(n), make_inputs(i, batch))
        both.run(table, n, make_inputs(i + 10, batch))
    assert len(both.rewritten._graphs) == 1


def test_compiled(device):
    step, new = make_step(), slot_step(make_step())
    pool = torch.randn(SLOTS, H, V, K, device=device)
    plain, table, address = pool.clone(), make_table(1).to(device), pool.data_ptr()
    for n in ([1, 1, 1], [3, 1, 2], [2, 3, 3]):
        args = table, torch.tensor(n, device=device), *(x.to(device) for x in make_inputs(n[1]))
        torch.testing.assert_close(new(pool, *args), step(plain, *args), atol=1e-4, rtol=1e-4)
    assert pool.data_ptr() == address


class Engine(nn.Module):
    """Two layers with gate parameters, pools as buffers; a cache of another kind is stored by position too."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        pools = torch.randn(2, SLOTS, H, V, K, generator=generator)
        self.register_buffer("first", pools[0].clone())
        self.register_buffer("second", pools[1].clone())
        self.register_buffer("values", torch.zeros(SLOTS, T, H, V))
        self.A_log = nn.Parameter(torch.randn(H, generator=generator), requires_grad=False)

    def step(self, table, n, q, k, v, g, beta):
        self.values[table[:, 0]] = v
        for pool in (self.first, self.second):
            S = pool[table[torch.arange(B), n - 1]]
            decay = -self.A_log.exp().view(-1, 1) * nn.functional.softplus(-g)
            v, states = window(S, q, k, v, decay, beta)
            pool[table] = torch.stack(states, 1)
        return {"o": v, "rows": B}


def test_methods_of_a_module_with_two_layers():
    engine, plain = Engine(), Engine()
    new, table = slot_step(engine.step, backend=None, check=True), make_table(5)
    assert new.prepare(table, torch.ones(B, dtype=torch.int64), *make_inputs(0)).matched == 2
    for i, n in enumerate(([1, 1, 1], [2, 3, 1], [3, 3, 2])):
        args = table, torch.tensor(n), *make_inputs(i)
        torch.testing.assert_close((new(*args), engine.values), (plain.step(*args), plain.values))
    tokens = 2 * SLOTS * (T - 1) * 4 * (H * V + H * K + H * K)
    assert new.record_bytes == tokens + 2 * SLOTS * T * 8
    accepted = torch.tensor([3, 1, 2])
    new.settle(table, accepted, *make_inputs(0))
    for pool, other in ((engine.first, plain.first), (engine.second, plain.second)):
        torch.testing.assert_close(pool[table[:, 0]], other[table[torch.arange(B), accepted - 1]])
    new(table, accepted, *make_inputs(9))
    engine.A_log.add_(1)
    with pytest.raises(RuntimeError, match="settle all rows and reset"):
        new(table, accepted, *make_inputs(9))
    new.reset()
    assert new(table, accepted, *make_inputs(9))["o"].isnan().any(1).flatten(1).any(1).tolist() == [True, False, True]


@pytest.mark.parametrize("change", ["slots", "after_settle", "never_stepped", "window_was_shorter"])
def test_a_row_without_a_record_of_its_own_is_nan_and_no_other_state(change):
    """Only position 0 can be read there. Rows that keep to the promise are not touched by it."""
    both, table, n = Both(make_step()), make_table(1), torch.tensor([1, 1, 1])
    other = table.clone()
    if change != "never_stepped":
        both.run(table, n, make_inputs(0))
    if change == "slots":
        other[1, 2] = max(set(range(SLOTS)) - set(table.flatten().tolist()))
    elif change == "after_settle":
        both.rewritten.settle(both.pool, table[1:2], n[1:2], *make_inputs(0, 1))
    elif change == "window_was_shorter":
        both.rewritten(both.pool, table[1:2], n[1:2], *make_inputs(0, 1, T=2))
    n = torch.tensor([1, 3, 1]) if change == "never_stepped" else torch.tensor([2, 3, 1])
    plain = both.plain(both.plain_pool, table, n, *make_inputs(1))
    o = both.rewritten(both.pool, other, n, *make_inputs(1))
    torch.testing.assert_close(o[[0, 2]], plain[[0, 2]])
    assert o[1].isnan().all()


def test_scan_and_layers_without_a_delta():
    def gated(S, q, k, v, g, beta):
        outs, states = [], []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp().unsqueeze(-2) + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
            outs.append((S * q[:, t].unsqueeze(-2)).sum(-1))
            states.append(S)
        return torch.stack(outs, 1), states

    for run, exact in ((scanned, window), (gated, gated)):
        both = Both(make_step(window=run), make_step(window=exact, compute=torch.float64))
        for i, n in enumerate(([1, 1, 1], [3, 1, 2], [2, 3, 3])):
            both.run(make_table(1), torch.tensor(n), make_inputs(i))


# --- near misses --------------------------------------------------------------------------------------------------------


def read_first(pool, table, n):
    return pool[table[:, 0]]


def read_other_table(pool, table, n):
    return pool[(table + 1)[torch.arange(B), n - 1]]


def read_shifted_rows(pool, table, n):
    return pool[table[torch.tensor([1, 2, 0]), n - 1]]


def read_twice(pool, table, n):
    return read_index(pool, table, n) + 0 * pool.sum()


def read_rearranged(pool, table, n):
    return read_index(pool, table, n).transpose(-1, -2).reshape(B, H, V, K)


def write_shifted(pool, table, states):
    pool[table.roll(1, 1)] = torch.stack(states, 1)


def write_backwards(pool, table, states):
    pool[table.flip(1)] = torch.stack(states, 1)


def write_later_positions(pool, table, states):
    pool[table[:, 1:]] = torch.stack(states[1:], 1)


def write_added(pool, table, states):
    pool.index_put_((table,), torch.stack(states, 1), accumulate=True)


def write_rounded(pool, table, states):
    pool[table] = torch.stack(states, 1).bfloat16().float()


def write_changed(pool, table, states):
    pool[table] = torch.stack(states, 1) * 2


def read_again(pool, table, n, *inputs):
    return make_step()(pool, table, n, *inputs) + pool.sum()


def write_twice(pool, table, states):
    pool[table] = torch.stack(states, 1)
    pool[table[:, 0]] = states[1]


def look_alike(S, *inputs):
    o, states = window(S, *inputs)
    return o, [states[0], states[1].tanh(), states[2]]


ONE_LOOKUP, COLUMNS = "not read by one lookup", "columns 0, 1, .."
NEAR_MISSES = [
    (make_step(read_first), ONE_LOOKUP),
    (make_step(read_other_table), "stored_per_position"),
    (make_step(read_shifted_rows), ONE_LOOKUP),
    (make_step(read_twice), ONE_LOOKUP),
    (make_step(read_rearranged), "not laid out"),
    (make_step(write=write_shifted), "stored_per_position"),
    (make_step(write=write_backwards), "stored_per_position"),
    (make_step(write=write_later_positions), COLUMNS),
    (make_step(write=write_added), "stored_per_position"),
    (make_step(write=write_rounded), "rounded to another dtype"),
    (make_step(write=write_changed), "no_selection"),
    (read_again, "read after it was written"),
    (make_step(write=write_twice), "stored_per_position"),
    (make_step(window=look_alike), "no pool"),
]
NAMES = "first table rows twice rearranged shifted backwards later added rounded changed read_after written_twice look_alike"


@pytest.mark.parametrize(("step", "why"), NEAR_MISSES, ids=NAMES.split())
def test_near_misses_are_refused_before_anything_is_run(step, why):
    args = torch.randn(SLOTS, H, V, K), make_table(1), torch.ones(B, dtype=torch.int64), *make_inputs(0)
    before = copied(args)
    with pytest.raises(RuntimeError, match=re.escape("slot_step cannot rewrite this step: ") + ".*" + re.escape(why)):
        slot_step(step, backend=None)(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))


def test_other_layouts_and_widths_are_refused():
    def key_first(pool, table, n, *inputs):
        o, states = window(read_index(pool, table, n).transpose(-1, -2), *inputs)
        pool[table] = torch.stack(states, 1).transpose(-1, -2)
        return o

    n, inputs = torch.ones(B, dtype=torch.int64), make_inputs(0)
    with pytest.raises(RuntimeError, match="not laid out"):
        slot_step(key_first, backend=None)(torch.randn(SLOTS, H, K, V), make_table(1), n, *inputs)
    new, pool = slot_step(make_step(), backend=None), torch.randn(SLOTS, H, V, K)
    with pytest.raises(RuntimeError, match="width has to be"):
        new(pool, torch.zeros(B, 18, dtype=torch.int64), n, *inputs)
    new(pool, make_table(1), n, *inputs)
    with pytest.raises(RuntimeError, match="tables of the same width"):
        new(pool, make_table(1, W=4), n, *inputs)


@pytest.mark.parametrize("write", [write_whole, write_each], ids=lambda f: f.__name__)
def test_the_pass_alone_refuses_and_names_the_cure(write):
    args = torch.randn(SLOTS, H, V, K), make_table(1), torch.ones(B, dtype=torch.int64), *make_inputs(0)
    report = explain(make_step(write=write), *args, dynamic=False)
    assert [layer.reason for layer in report.layers] == ["stored_per_position"] and "slot_step" in str(report)


DOCS = Path(__file__).parent.parent / "docs" / "slot_step.md"


def test_example_of_the_documentation():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["step"].report.matched == 1

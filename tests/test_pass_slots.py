"""``slot_step``: the states of every position are stored, and the next step begins with the accepted one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from slot_steps import (
    SLOTS,
    B,
    Both,
    H,
    K,
    Requests,
    T,
    V,
    make_inputs,
    make_step,
    make_table,
    read_flat,
    read_gather,
    read_index,
    read_take_along,
    scanned,
    window,
    write_each,
    write_flat,
    write_token_first,
    write_whole,
    write_with_index_put,
)
from torch import Tensor, nn
from torch._dynamo.utils import ReinplaceCounters

import recoverssm_ops.ops as ops
from compile_passes import slot_step


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


READS = [read_take_along, read_gather, read_flat]
WRITES = [write_whole, write_each, write_flat, write_token_first, write_with_index_put]
SPELLINGS = [*((read, write_whole) for read in READS), *((read_index, write) for write in WRITES)]


@pytest.mark.parametrize(("read", "write"), SPELLINGS, ids=lambda f: f.__name__)
def test_several_steps_equal_the_plain_step(read, write):
    both, table, n = Both(make_step(read, write)), make_table(1), torch.ones(B, dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)
    for i in range(6):
        both.run(table, n, make_inputs(i))
        n = torch.randint(1, T + 1, (B,), generator=generator)
    both.settle(table, n, make_inputs(0))
    (layer,) = both.rewritten.report.layers
    assert layer.form == "commit" and layer.source.startswith("slot_steps.py:")


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
    ReinplaceCounters.clear()
    step, new = make_step(), slot_step(make_step())
    pool = torch.randn(SLOTS, H, V, K, device=device)
    plain, table, address = pool.clone(), make_table(1).to(device), pool.data_ptr()
    for n in ([1, 1, 1], [3, 1, 2], [2, 3, 3]):
        args = table, torch.tensor(n, device=device), *(x.to(device) for x in make_inputs(n[1]))
        torch.testing.assert_close(new(pool, *args), step(plain, *args), atol=1e-4, rtol=1e-4)
    assert pool.data_ptr() == address and ReinplaceCounters.get_total_missed() == 0


@pytest.mark.cuda
def test_one_captured_graph_replays_every_step():
    """Table, counts and inputs are read at replay; padding rows before, since capturing needs a run."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    new, pool = slot_step(make_step(), backend=None), torch.randn(SLOTS, H, V, K, device="cuda")
    n = torch.ones(B, dtype=torch.int64, device="cuda")
    static = [torch.zeros(B, T, dtype=torch.int64, device="cuda"), n, *(x.cuda() for x in make_inputs(0))]
    new(pool, *static)  # slot 0 is nobody's
    torch.cuda.synchronize()
    graph, table = torch.cuda.CUDAGraph(), 1 + torch.randperm(SLOTS - 1, device="cuda")[: B * T].view(B, T)
    with torch.cuda.graph(graph):
        o = new(pool, *static)
    plain = pool.clone()
    for i, accepted in enumerate(([1, 1, 1], [3, 1, 2], [2, 3, 3], [1, 3, 1])):
        args = table, torch.tensor(accepted, device="cuda"), *(x.cuda() for x in make_inputs(i))
        for x, y in zip(static, args, strict=True):
            x.copy_(y)
        graph.replay()
        torch.testing.assert_close(o, make_step()(plain, *args), atol=1e-4, rtol=1e-4)


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


def test_a_plain_step_of_one_token_between():
    both, table, n = Both(make_step()), make_table(1), torch.ones(B, dtype=torch.int64)
    both.run(table, n, make_inputs(0))
    n = torch.tensor([3, 1, 2])
    both.settle(table, n, make_inputs(0))
    one, pools = make_inputs(1, T=1), (both.pool, both.plain_pool, both.exact_pool)
    for pool, step in zip(pools, (both.plain, both.plain, both.exact), strict=True):
        settled = pool is both.pool
        first = table[:, :1] if settled else table[torch.arange(B), n - 1].unsqueeze(1)
        o = step(pool, first, torch.ones_like(n), *one)
        if not settled:  # for the next step to begin with
            pool[table[:, 0]] = pool[first[:, 0]]
        assert not o.isnan().any()
    both.run(table, torch.ones_like(n), make_inputs(2))


def test_records_are_read_as_they_were_made():
    """Windows of two tokens normalise q and k here, others do not: one record cannot be of both."""

    def step(pool, table, n, q, k, v, g, beta):
        if q.shape[1] == 2:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return make_step()(pool, table, n, q, k, v, g, beta)

    new, pool, n = slot_step(step, backend=None), torch.randn(SLOTS, H, V, K), torch.ones(B, dtype=torch.int64)
    new(pool, make_table(1), n, *make_inputs(0, T=2))
    with pytest.raises(RuntimeError, match="norm and gate alike"):
        new(pool, make_table(1), n, *make_inputs(0, T=3))


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


DOCS = Path(__file__).parent.parent / "docs" / "slot_step.md"


def test_example_of_the_documentation():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["step"].report.matched == 1

"""kda_commit and kda_recover against the token-by-token oracle: every accepted length, plans, layouts, index types."""

import itertools

import pytest
import torch
from budget import assert_within_budget, verify_slack
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import guarded_pool, make_window, oracle, same_bits

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [4, 0, 4, 1, 2, 3]
ACCEPTED = [4, 0, 2, 1, 1, 3]
SLOTS = [7, 2, 5, 0, 8, 3]


def pool_for(window, slots: int, dtype=torch.float32, **layout):
    shape = (slots, *window.v.shape[2:], window.k.shape[-1])
    return guarded_pool(*shape, dtype=dtype, device=window.q.device, seed=7, **layout)


def check_commit(window, pool, slots, accepted, index_dtype=torch.int64) -> None:
    """Recover, then commit in place: both within budget of the oracle, no other slot touched."""
    index = torch.tensor(slots, device=window.q.device, dtype=index_dtype)
    n = torch.tensor(accepted, device=window.q.device, dtype=index_dtype)
    answer = oracle(window, pool.state[index.long()])
    _, record = rs.kda_verify(*window.inputs, pool.state, index, **window.options)
    recovered = rs.kda_recover(pool.state[index.long()], record, n, cu_seqlens=window.options.get("cu_seqlens"))
    pool.check_unchanged()
    assert recovered.dtype == torch.float32 and recovered.is_contiguous()
    assert_within_budget(
        recovered.cpu(), *answer.states(accepted), name="recovered", slack=4 * verify_slack(pool.state)
    )
    assert rs.kda_commit(pool.state, record, n, index, cu_seqlens=window.options.get("cu_seqlens")) is None
    assert_within_budget(pool.state[index.long()].cpu(), *answer.states(accepted), name="committed")
    pool.check_only_written(slot for slot, count in zip(slots, accepted, strict=True) if count > 0)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["raw", "l2norm"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "precomputed"])
def test_product_of_options(device, gate, scalar, groups, l2norm, packed):
    window = make_window(
        6,
        4,
        value_heads=2 * groups,
        gate=gate,
        scalar_gate=scalar,
        l2norm=l2norm,
        beta="neg_eigval",
        lengths=LENGTHS if packed else None,
        tail=2 if packed else 0,
        device=device,
    )
    check_commit(window, pool_for(window, 9), SLOTS, ACCEPTED)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=lambda d: f"pool={d}".replace("torch.", ""))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: f"in={d}".replace("torch.", ""))
def test_dtypes(device, dtype, pool_dtype):
    for gate, gate_dtype in itertools.product(("bounded", "unbounded"), (dtype, torch.float32)):
        window = make_window(6, 4, value_heads=4, gate=gate, dtype=dtype, gate_dtype=gate_dtype, device=device, seed=1)
        check_commit(window, pool_for(window, 9, pool_dtype), SLOTS, ACCEPTED)


@pytest.mark.parametrize("T", range(1, 17))
def test_every_accepted_length(device, T):
    """One row per accepted length 0..T of the same window."""
    for gate in ("bounded", "unbounded"):
        window = make_window(T + 1, T, heads=1, value_heads=1, gate=gate, device=device, seed=T)
        check_commit(window, pool_for(window, T + 2), list(range(T + 1, 0, -1)), list(range(T + 1)))


@pytest.mark.parametrize("K, V", [(1, 1), (1, 5), (7, 3), (24, 40), (33, 16), (128, 128), (200, 256), (256, 17)])
def test_head_sizes(device, K, V):
    window = make_window(2, 3, heads=1, value_heads=2, key_dim=K, value_dim=V, device=device, seed=3)
    check_commit(window, pool_for(window, 3), [2, 0], [3, 2])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("packed_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(device, index_dtype, packed_dtype):
    window = make_window(6, 4, lengths=LENGTHS, index_dtype=packed_dtype, device=device)
    check_commit(window, pool_for(window, 9), SLOTS, ACCEPTED, index_dtype)


def test_index_dtypes_may_differ(device):
    window = make_window(3, 4, device=device)
    for slot_dtype, count_dtype in itertools.product((torch.int32, torch.int64), repeat=2):
        pool = pool_for(window, 4)
        answer = oracle(window, pool.state[:3])
        slots = torch.arange(3, device=device, dtype=slot_dtype)
        _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
        rs.kda_commit(pool.state, record, torch.tensor([1, 2, 4], device=device, dtype=count_dtype), slots)
        assert_within_budget(pool.state[:3].cpu(), *answer.states([1, 2, 4]))


def test_index_tensors_of_any_stride(device):
    """Columns of a scheduler's table: every second element of a longer tensor."""
    window = make_window(3, 4, device=device)
    table = torch.tensor([[4, 1], [0, 3], [2, 4]], device=device)
    slots, n = table[:, 0], table[:, 1]
    pool = pool_for(window, 6)
    answer = oracle(window, pool.state[slots])
    _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
    rs.kda_commit(pool.state, record, n, slots)
    assert_within_budget(pool.state[slots].cpu(), *answer.states(n))
    pool.check_only_written(slots)


def test_without_state_indices_row_b_is_slot_b(device):
    window = make_window(3, 4, device=device)
    pool = pool_for(window, 5)
    answer = oracle(window, pool.state[:3])
    _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    rs.kda_commit(pool.state, record, torch.tensor([4, 1, 2], device=device))
    assert_within_budget(pool.state[:3].cpu(), *answer.states([4, 1, 2]))
    pool.check_only_written([0, 1, 2])


def test_layer_inputs_of_any_stride(device):
    """The record refers to slices of a fused projection; commit reads them through their strides."""
    window = make_window(6, 4, key_dim=6, value_dim=6, device=device)
    q, k, v, g = torch.cat([window.q, window.k, window.v, window.g], dim=-1).split(6, dim=-1)
    check_commit(window.with_inputs(q=q, k=k, v=v, g=g), pool_for(window, 9), SLOTS, ACCEPTED)

    def spread(x):
        return torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]

    sparse = window.with_inputs(k=spread(window.k), g=spread(window.g))
    check_commit(sparse, pool_for(window, 9), SLOTS, ACCEPTED)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_plan_columns(device, packed, pool_dtype):
    """One commit writes the states after several lengths, each to its own slot."""
    window = make_window(3, 5, value_heads=4, lengths=[5, 2, 4] if packed else None, device=device)
    pool = pool_for(window, 12, pool_dtype)
    source = [9, 3, 6]
    dest = [[9, 0, 1], [4, 3, -1], [-1, -1, 11]]
    length = [[5, 2, 0], [1, 2, 2], [4, 4, 3]]
    answer = oracle(window, pool.state[source])
    _, record = rs.kda_verify(*window.inputs, pool.state, torch.tensor(source, device=device), **window.options)
    plan = rs.CommitPlan(*(torch.tensor(x, device=device) for x in (source, dest, length)))
    rs.kda_commit(pool.state, record, None, plan=plan)
    for column in range(3):
        rows = [row for row in range(3) if dest[row][column] >= 0]
        written = pool.state[[dest[row][column] for row in rows]].cpu()
        expected = [x[rows] for x in answer.states([length[row][column] for row in range(3)])]
        assert_within_budget(written, *expected, name=f"column {column}")
    pool.check_only_written(slot for row in dest for slot in row if slot >= 0)


def test_plan_in_place_is_the_default(device):
    window = make_window(3, 4, device=device)
    n, slots = torch.tensor([4, 0, 2], device=device), torch.tensor([1, 3, 0], device=device)
    pools = []
    for plan in (None, rs.CommitPlan.in_place(n, slots)):
        pool = pool_for(window, 4)
        _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
        if plan is None:
            rs.kda_commit(pool.state, record, n, slots)
        else:
            rs.kda_commit(pool.state, record, None, plan=plan)
        pools.append(pool)
    assert same_bits(pools[0].storage, pools[1].storage)
    pools[0].check_only_written([1, 0])


def test_plan_without_columns_or_rows_writes_nothing(device):
    for batch, columns in ((3, 0), (0, 2), (0, 0)):
        window = make_window(batch, 4, device=device)
        pool = pool_for(window, 4)
        _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
        source = torch.zeros(batch, dtype=torch.int64, device=device)
        table = torch.zeros(batch, columns, dtype=torch.int64, device=device)
        rs.kda_commit(pool.state, record, None, plan=rs.CommitPlan(source, table, table))
        pool.check_unchanged()


def test_recover_returns_a_fresh_tensor(device):
    """Also where nothing was accepted and the checkpoint is float32 already; strided checkpoints are fine."""
    window = make_window(2, 4, device=device)
    for pool in (pool_for(window, 2), pool_for(window, 2, guard=0)):
        _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
        recovered = rs.kda_recover(pool.state, record, torch.zeros(2, dtype=torch.int32, device=device))
        assert same_bits(recovered, pool.state)
        recovered.fill_(7.0)
        pool.check_unchanged()


def test_recover_of_an_empty_batch(device):
    window = make_window(0, 4, device=device)
    pool = pool_for(window, 2)
    _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    recovered = rs.kda_recover(pool.state[:0], record, torch.zeros(0, dtype=torch.int32, device=device))
    assert recovered.shape == (0, 2, 6, 8) and recovered.dtype == torch.float32


def test_commit_equals_recover(device):
    """The same bits for a float32 pool: there is one recovery."""
    window = make_window(4, 6, value_heads=4, key_dim=32, value_dim=24, device=device)
    n = torch.tensor([6, 1, 0, 4], device=device)
    pool = pool_for(window, 4)
    _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    recovered = rs.kda_recover(pool.state, record, n)
    rs.kda_commit(pool.state, record, n)
    assert same_bits(pool.state, recovered)


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 8)), min_size=1, max_size=7),
    scalar=st.booleans(),
    gate=st.sampled_from(["bounded", "unbounded", "precomputed"]),
    pool_dtype=st.sampled_from(FLOATS),
    columns=st.integers(1, 3),
    data=st.data(),
)
def ragged_plan(device, rows, scalar, gate, pool_dtype, columns, data):
    batch, lengths = len(rows), [length for length, _ in rows]
    T = max(1, *lengths)
    slots = data.draw(st.permutations(range(batch * (columns + 1))))
    source, free = slots[:batch], slots[batch:]
    dest = [free[b * columns : (b + 1) * columns] for b in range(batch)]
    for b in range(batch):  # a column goes to a slot of its own, back to the source, or nowhere
        dest[b][0] = data.draw(st.sampled_from([dest[b][0], source[b], -1]))
    length = [[(n + column) % 9 for column in range(columns)] for _, n in rows]
    window = make_window(batch, T, lengths=lengths, scalar_gate=scalar, gate=gate, device=device, seed=sum(lengths))
    pool = pool_for(window, len(slots), pool_dtype)
    answer = oracle(window, pool.state[source])
    _, record = rs.kda_verify(*window.inputs, pool.state, torch.tensor(source, device=device), **window.options)
    plan = rs.CommitPlan(*(torch.tensor(x, device=device) for x in (source, dest, length)))
    rs.kda_commit(pool.state, record, None, plan=plan)
    for column in range(columns):
        written = [b for b in range(batch) if dest[b][column] >= 0]
        states = [x[written] for x in answer.states([length[b][column] for b in range(batch)])]
        if written:
            assert_within_budget(pool.state[[dest[b][column] for b in written]].cpu(), *states)
    pool.check_only_written(slot for row in dest for slot in row if slot >= 0)


def test_ragged_plans(device):
    """Packed rows of any length, plans with columns of any length, skipped, aliased with the source or apart."""
    ragged_plan(device)

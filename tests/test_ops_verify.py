"""kda_verify against the token-by-token oracle, over its options. test_ops_commit.py has the committed state."""

import itertools

import pytest
import torch
from budget import assert_within_budget, verify_slack
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import GuardedPool, Window, guarded_pool, make_window, oracle

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PACKED = [3, 0, 5, 1, 4, 2]


def pool_for(window: Window, slots: int, dtype=torch.float32, seed: int = 7, **layout) -> GuardedPool:
    shape = (slots, *window.v.shape[2:], window.k.shape[-1])
    return guarded_pool(*shape, dtype=dtype, device=window.q.device, seed=seed, **layout)


def check_verify(window: Window, pool: GuardedPool, slots: list[int] | None, index_dtype=torch.int64) -> rs.Record:
    """Outputs and corrections of every row within budget, the record refers to its inputs, the pool is untouched."""
    indices = None if slots is None else torch.tensor(slots, device=window.q.device, dtype=index_dtype)
    o, record = rs.kda_verify(*window.inputs, pool.state, indices, **window.options)

    assert o.shape == window.v.shape and o.dtype == window.v.dtype and o.is_contiguous()
    assert record.u.shape == window.v.shape and record.u.dtype == torch.float32 and record.u.is_contiguous()
    assert record.k is window.k and record.g is window.g
    answer = oracle(window, [pool.state[s] for s in (range(len(window.lengths)) if slots is None else slots)])
    for name, actual, (expected, sequential) in (
        ("o", o, answer.outputs()),
        ("u", record.u, answer.corrections()),
    ):
        slack = verify_slack(pool.state)
        assert_within_budget(torch.cat(window.rows(actual)).cpu(), expected, sequential, name=name, slack=slack)
        if window.packed:
            tail = actual[0, int(window.options["cu_seqlens"][-1]) :]
            assert torch.equal(tail, torch.zeros_like(tail)), f"{name} of tokens in no row should be zero"
    pool.check_unchanged()
    return record


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("beta", ["plain", "sigmoid", "neg_eigval"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["raw", "l2norm"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "precomputed"])
def test_product_of_options(device, gate, scalar, groups, l2norm, beta, packed):
    window = make_window(
        len(PACKED) if packed else 3,
        5,
        value_heads=2 * groups,
        gate=gate,
        scalar_gate=scalar,
        l2norm=l2norm,
        beta=beta,
        lengths=PACKED if packed else None,
        tail=3 if packed else 0,
        device=device,
    )
    check_verify(window, pool_for(window, 9), [7, 2, 5, 0, 8, 3][: len(window.lengths)])


@pytest.mark.parametrize("gate_dtype", FLOATS[:2], ids=lambda d: f"g={d}".replace("torch.", ""))
@pytest.mark.parametrize("pool_dtype", FLOATS, ids=lambda d: f"pool={d}".replace("torch.", ""))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: f"in={d}".replace("torch.", ""))
def test_dtypes(device, dtype, pool_dtype, gate_dtype):
    if gate_dtype != torch.float32 and gate_dtype != dtype:
        gate_dtype = dtype  # g and beta have the dtype of the rest, or float32
    for lengths, gate in itertools.product((None, PACKED), ("bounded", "unbounded")):
        window = make_window(
            6, 5, value_heads=4, gate=gate, dtype=dtype, gate_dtype=gate_dtype, lengths=lengths, device=device, seed=1
        )
        check_verify(window, pool_for(window, 6, pool_dtype), [5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize("parameter_dtype", FLOATS[:2], ids=str)
def test_gate_parameter_dtypes_and_layouts(device, parameter_dtype):
    """A_log and dt_bias in bf16; dt_bias as [HV, K], [HV*K] or (scalar gate) [HV]; either of them absent."""
    for scalar in (False, True):
        window = make_window(2, 4, scalar_gate=scalar, device=device, seed=2)
        pool, given = pool_for(window, 2), window.options
        A_log, dt_bias = (given[name].to(parameter_dtype) for name in ("A_log", "dt_bias"))
        variants = [
            {"A_log": A_log, "dt_bias": dt_bias},
            {"A_log": A_log, "dt_bias": dt_bias.flatten()},
            {"A_log": A_log, "dt_bias": None},
            {"A_log": None, "dt_bias": dt_bias},
            {"A_log": None, "dt_bias": None},
        ]
        for variant in variants:
            window.options = given | variant
            check_verify(window, pool, [1, 0])
        for variant in variants[:3]:
            window.options = given | variant | {"lower_bound": None}
            check_verify(window, pool, [1, 0])


@pytest.mark.parametrize("T", range(1, 17))
def test_every_window_length(device, T):
    for gate in ("bounded", "unbounded"):
        window = make_window(2, T, gate=gate, beta="neg_eigval", device=device, seed=T)
        check_verify(window, pool_for(window, 2), None)
    lengths = [T, 0, (T + 1) // 2]
    window = make_window(3, T, lengths=lengths, tail=1, device=device, seed=T)
    check_verify(window, pool_for(window, 4), [3, 1, 0])


@pytest.mark.parametrize(
    "K, V", [(1, 1), (1, 5), (7, 3), (24, 40), (33, 16), (96, 72), (128, 128), (200, 256), (256, 17)]
)
def test_head_sizes(device, K, V):
    window = make_window(2, 3, heads=1, value_heads=2, key_dim=K, value_dim=V, device=device, seed=3)
    check_verify(window, pool_for(window, 3), [2, 0])


@pytest.mark.parametrize("heads, value_heads", [(1, 1), (1, 5), (3, 3), (2, 8), (3, 9)])
def test_value_heads_share_key_heads_in_consecutive_groups(device, heads, value_heads):
    window = make_window(2, 4, heads=heads, value_heads=value_heads, device=device, seed=4)
    check_verify(window, pool_for(window, 3), [2, 0])


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(device, scale):
    window = make_window(2, 4, device=device, seed=5)
    window.options["scale"] = scale
    check_verify(window, pool_for(window, 2), None)


def test_default_scale_is_the_inverse_root_of_K(device):
    window = make_window(2, 4, key_dim=16, device=device, seed=5)
    pool = pool_for(window, 2)
    o, _ = rs.kda_verify(*window.inputs, pool.state, **window.options)
    explicit, _ = rs.kda_verify(*window.inputs, pool.state, **window.options, scale=0.25)
    assert torch.equal(o, explicit)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("packed_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(device, index_dtype, packed_dtype):
    window = make_window(3, 4, lengths=[4, 1, 2], index_dtype=packed_dtype, device=device, seed=6)
    check_verify(window, pool_for(window, 5), [4, 0, 2], index_dtype)


def test_inputs_of_any_stride(device):
    """Slices of one fused projection, transposed heads, every second channel, broadcast rows."""
    window = make_window(2, 4, heads=2, value_heads=2, key_dim=6, value_dim=6, device=device, seed=8)
    fused = torch.cat([window.q, window.k, window.v], dim=-1)
    q, k, v = fused.split(6, dim=-1)
    check_verify(window.with_inputs(q=q, k=k, v=v), pool_for(window, 2), None)

    head_first = {
        name: getattr(window, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "g")
    }
    check_verify(window.with_inputs(**head_first), pool_for(window, 2), None)

    def spread(x):
        return torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]

    sparse = {name: spread(getattr(window, name)) for name in ("q", "k", "v", "g", "beta")}
    assert sparse["k"].stride(-1) == 2
    check_verify(window.with_inputs(**sparse), pool_for(window, 2), None)

    same = {
        name: getattr(window, name)[:1].expand(2, *[-1] * (getattr(window, name).ndim - 1)) for name in ("q", "k", "g")
    }
    check_verify(window.with_inputs(**same), pool_for(window, 2), None)


def test_rows_that_share_nothing_give_what_they_give_alone(device):
    """A batch of rows equals the rows one by one, within the last bits; neighbours leak into nobody."""
    window = make_window(4, 5, value_heads=4, device=device, seed=9)
    pool = pool_for(window, 4)
    together, _ = rs.kda_verify(*window.inputs, pool.state, **window.options)
    answer = oracle(window, pool.state)
    for b in range(4):
        alone, _ = rs.kda_verify(*(x[b : b + 1] for x in window.inputs), pool.state[b : b + 1], **window.options)
        assert_within_budget(alone[0].cpu(), answer.rows64[b][0], answer.rows32[b][0], name="alone")
        assert_within_budget(together[b].cpu(), answer.rows64[b][0], answer.rows32[b][0], name="together")


def test_packed_equals_dense(device):
    dense = make_window(3, 4, device=device, seed=10)
    flat = {name: getattr(dense, name).flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    layout = {"cu_seqlens": torch.tensor([0, 4, 8, 12], device=device), "max_seqlen": 4}
    pool = pool_for(dense, 3)
    expected, expected_record = rs.kda_verify(*dense.inputs, pool.state, **dense.options)
    packed = Window(**flat, options=dense.options | layout, lengths=[4, 4, 4])
    o, record = rs.kda_verify(*packed.inputs, pool.state, **packed.options)
    assert torch.equal(o, expected.flatten(0, 1).unsqueeze(0))
    assert torch.equal(record.u, expected_record.u.flatten(0, 1).unsqueeze(0))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    tail=st.integers(0, 3),
    spare=st.integers(0, 2),
    scalar=st.booleans(),
    gate=st.sampled_from(["bounded", "unbounded", "precomputed"]),
    pool_dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
def ragged_packing(device, lengths, tail, spare, scalar, gate, pool_dtype, data):
    T = max(1, *lengths) + spare
    tail = min(tail, T * len(lengths) - sum(lengths))
    slots = data.draw(st.permutations(range(len(lengths) + 2)))[: len(lengths)]
    window = make_window(
        len(lengths), T, lengths=lengths, tail=tail, scalar_gate=scalar, gate=gate, device=device, seed=sum(lengths)
    )
    check_verify(window, pool_for(window, len(lengths) + 2, pool_dtype), slots)


def test_ragged_packing(device):
    """Rows of any length 0..T in any slots, empty rows at either end, tokens after the last row."""
    ragged_packing(device)


def test_empty_batch_and_no_tokens(device):
    window = make_window(0, 4, device=device)
    o, record = rs.kda_verify(*window.inputs, pool_for(window, 3).state, **window.options)
    assert o.shape == record.u.shape == (0, 4, 2, 6)

    window = make_window(2, 4, lengths=[0, 0], device=device)
    pool = pool_for(window, 3)
    o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    assert o.shape == record.u.shape == (1, 0, 2, 6)
    rs.kda_commit(pool.state, record, torch.tensor([4, 1], device=device))
    pool.check_unchanged()

    window = make_window(0, 4, lengths=[], tail=0, device=device)
    o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    assert o.shape == record.u.shape == (1, 0, 2, 6)


def test_two_runs_give_the_same_bits(device):
    window = make_window(5, 8, value_heads=4, key_dim=32, value_dim=32, dtype=torch.bfloat16, device=device, seed=11)
    pool = pool_for(window, 5, torch.bfloat16)
    first, second = (rs.kda_verify(*window.inputs, pool.state, **window.options) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1].u, second[1].u)

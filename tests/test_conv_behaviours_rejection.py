"""Behaviours 4 and 6: rejected tokens leave the history alone, and history and state roll back to the same token."""

import math

import pytest
import torch
from budget import assert_within_budget
from conv_cases import check_history, conv_oracle, guarded_conv_pool, make_conv_window
from pools import SETTINGS_OF_THE_ORACLE, guarded_pool, make_window, same_bits

import recoverssm_ops as rs
from recoverssm_ops.reference import causal_conv1d, recurrence

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
GARBAGE = {"finite": 1e4, "inf": math.inf, "nan": math.nan}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("n", range(6))
def test_b04_rejected_tokens_change_no_bit(device, n, garbage, packed):
    """Not of the committed history, and not of an accepted token's output."""
    batch, T = 3, 5
    window = make_conv_window(batch, T, lengths=[T] * batch if packed else None, device=device)
    accepted = torch.full((batch,), n, device=device)
    spoiled = window.x.clone()
    spoiled.view(batch, T, -1)[:, n:] = GARBAGE[garbage]
    results = []
    for x in (window.x, spoiled):
        pool = guarded_conv_pool(batch, 12, device=device)
        y = rs.causal_conv1d_verify(x, *window.inputs[1:], pool.state, **window.options)
        rs.causal_conv1d_commit(pool.state, x, accepted, **window.layout)
        results.append((y.view(batch, T, -1)[:, :n], pool.storage))
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_b04_accepted_lengths_clamp_to_the_row(device, packed, index_dtype):
    lengths, extreme = [4, 2, 0, 3, 1, 4], torch.iinfo(index_dtype)
    for given in ([9] * 6, [extreme.max] * 6, [-1] * 6, [extreme.min] * 6, [5, -3, 1, 4, 2, 4]):
        window = make_conv_window(6, 4, lengths=lengths if packed else None, device=device)
        pool = guarded_conv_pool(6, 12, device=device)
        answer = conv_oracle(window, pool.state)
        n = torch.tensor(given, dtype=index_dtype, device=device)
        rs.causal_conv1d_commit(pool.state, window.x, n, **window.layout)
        for row in range(6):
            check_history(pool.state[row], answer, row, given[row])
        pool.check_guards()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b04_history_is_moved_bit_by_bit(device, dtype):
    """Signed zeros, subnormals, infinities and NaN payloads: untouched by 0 tokens, moved as they are by others."""
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    pattern = torch.randint(
        torch.iinfo(kind).min, torch.iinfo(kind).max, (4, 12, 3), generator=torch.Generator().manual_seed(1)
    ).to(kind)
    special = torch.tensor([-0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).smallest_normal / 2], dtype=dtype)
    pool = guarded_conv_pool(4, 12, dtype=dtype, device=device, guard=0)
    pool.state.view(kind).copy_(pattern)
    pool.state[0, :5, 2] = special.to(device)
    pool.remember()
    window = make_conv_window(2, 4, dtype=dtype, device=device)
    source = torch.tensor([0, 1], device=device)
    dest = torch.tensor([[0, 2], [3, 1]], device=device)
    plan = rs.CommitPlan(source, dest, torch.zeros_like(dest))
    before = pool.state.clone()
    rs.causal_conv1d_commit(pool.state, window.x, None, plan=plan)
    pool.check_only_written([2, 3])
    assert same_bits(pool.state, before[[0, 1, 0, 1]])
    rs.causal_conv1d_commit(pool.state, window.x, torch.tensor([1, 2], device=device))
    assert same_bits(pool.state[0, :, :2], before[0, :, 1:]) and same_bits(pool.state[1, :, 0], before[1, :, 2])


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("n", range(1, 6))
def test_b06_reject_at_every_position(device, n, width):
    """Always n of 5 tokens accepted, the rest garbage: history and state both equal plain decoding.

    A layer as models have it: the convolution's outputs are the recurrence's q, k and v, and one plan commits both.
    """
    T, windows, heads, K, V = 5, 4, 2, 8, 6
    sizes = [heads * K, heads * K, heads * V]
    gates = make_window(2, n * windows, heads=heads, key_dim=K, value_dim=V, gate="unbounded", device=device)
    sequence = make_conv_window(2, n * windows, channels=sum(sizes), width=width, bias=False, device=device)
    conv = guarded_conv_pool(4, sum(sizes), width, device=device)
    pool = guarded_pool(4, heads, V, K, device=device)
    slots = torch.tensor([3, 1], device=device)
    plan = rs.CommitPlan.in_place(torch.full((2,), n, device=device), slots)

    def split(y):
        return (part.unflatten(-1, (heads, -1)) for part in y.split(sizes, -1))

    def window_of(x, step):
        accepted = x[:, step * n : step * n + n]
        return torch.cat([accepted, torch.full_like(x[:, :1], 1e3).expand(-1, T - n, *x.shape[2:])], 1)

    # Plain decoding, token by token, in float64 and in float32.
    settings = {name: gates.options[name] for name in SETTINGS_OF_THE_ORACLE if name in gates.options}
    settings = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in settings.items()}
    weight = sequence.weight.cpu()
    exact, plain = {}, {}
    for dtype, plainly in ((torch.float64, exact), (torch.float32, plain)):
        for row in range(2):
            history, S = conv.state[slots[row]].cpu(), pool.state[slots[row]].cpu()
            y, plainly["history", row] = causal_conv1d(sequence.x[row].cpu(), weight, None, history, dtype=dtype)
            decay = (gates.g[row].cpu(), gates.beta[row].cpu())
            plainly["o", row], _, plainly["state", row] = recurrence(*split(y), *decay, S, dtype=dtype, **settings)

    def check(name, actual, at):
        for row in range(2):
            assert_within_budget(actual[row].cpu(), exact[name, row][at], plain[name, row][at], name=f"{name} {at}")

    for step in range(windows):
        x = window_of(sequence.x, step)
        q, k, v = split(rs.causal_conv1d_verify(x, sequence.weight, None, conv.state, slots))
        decay = (window_of(gates.g, step), window_of(gates.beta, step))
        o, record = rs.kda_verify(q, k, v, *decay, pool.state, slots, **gates.options)
        rs.causal_conv1d_commit(conv.state, x, None, plan=plan)
        rs.kda_commit(pool.state, record, None, plan=plan)
        tokens = (step + 1) * n
        check("o", o[:, :n], slice(step * n, tokens))
        check("state", pool.state[slots], tokens)
        for row in range(2):
            assert same_bits(conv.state[slots[row]].cpu(), exact["history", row][tokens].float())
    conv.check_only_written(slots)
    pool.check_only_written(slots)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b06_a_window_gives_what_plain_decoding_gives(device, dtype):
    """The same sum in the same order whatever T is: every bit (before the activation, which vectorises by shape)."""
    window = make_conv_window(2, 16, dtype=dtype, activation=None, device=device)
    whole, single = (guarded_conv_pool(2, 12, dtype=dtype, device=device) for _ in range(2))
    y = rs.causal_conv1d_verify(*window.inputs, whole.state, **window.options)
    rs.causal_conv1d_commit(whole.state, window.x, torch.tensor([16, 16], device=device))
    one = torch.ones(2, dtype=torch.int64, device=device)
    for t in range(16):
        x = window.x[:, t : t + 1]
        assert same_bits(
            rs.causal_conv1d_verify(x, *window.inputs[1:], single.state, **window.options), y[:, t : t + 1].contiguous()
        )
        rs.causal_conv1d_commit(single.state, x, one)
    assert same_bits(single.storage, whole.storage)

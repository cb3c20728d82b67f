"""The same layer on tensors laid out otherwise: axes exchanged, sizes that coincide, other slots and pools.

Whatever the pass rewrites here has to compute what the original did; most of it it should rewrite.
"""

import pytest
import torch
from layouts import Layouts, check_layout, kind, run_window
from plain_layers import SLOTS, B, T, make_inputs, plain_step, select
from rewriting import compile_rewritten, copied, run_rewritten

CASES = Layouts()
case = CASES.case


@case("commit")
def heads_before_tokens(pool, slots, q, k, v, g, beta, n):
    """[B, H, T, ...], as attention libraries have it."""
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in (q, k, v, g, beta))
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S, o = plain_step(S, q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t])
        outs.append(o)
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 2)


@case("commit")
def strided_inputs(pool, slots, q, k, v, g, beta, n):
    """q, k and v are slices of one projection."""
    qkv = torch.cat([q, k, v], -1)
    q, k, v = qkv.split([q.shape[-1], k.shape[-1], v.shape[-1]], -1)
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit", lambda: make_inputs(B=3, T=3, H=3, K=3, V=3))
def all_sizes_alike(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("recover", lambda: make_inputs(K=6))
def key_first_state_of_value_first_pool(pool, slots, q, k, v, g, beta, n):
    """Square states, read and written as their transposes."""
    S, outs, states = pool[slots].float(), [], []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - (S * k[:, t].unsqueeze(-1)).sum(-2))
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((S * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit", lambda: make_inputs(K=6))
def transposed_twice(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots].transpose(-1, -2), [], []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - (S * k[:, t].unsqueeze(-1)).sum(-2))
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append((S * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n).transpose(-1, -2)
    return torch.stack(outs, 1)


@case("recover", lambda: make_inputs(K=6))
def written_back_transposed(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n).transpose(-1, -2)
    return o


@case("recover")
def written_back_with_rows_exchanged(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n).flip(0)
    return o


def one_slot():
    """One request in a pool that has room for it alone, as a small program has."""
    pool, _, *rest = make_inputs(B=1)
    return pool[:1].clone(), torch.tensor([0]), *rest


@case("commit", one_slot)
def pool_of_one_slot(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("recover", lambda: (torch.zeros(1, *make_inputs()[0].shape[1:]), torch.tensor([0]), *make_inputs(B=1)[2:]))
def pool_of_one_slot_added_to(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool.index_put_((slots,), select(states, n), accumulate=True)
    return o


@case("recover")
def written_to_other_slots(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots.flip(0)] = select(states, n)
    return o


@case("recover")
def added_to_the_pool(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool.index_put_((slots,), select(states, n), accumulate=True)
    return o


@case("recover", lambda: make_inputs(H=5))
def written_along_another_axis(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[torch.arange(3), slots] = select(states, n)[torch.arange(3), slots]
    return o


@case("recover")
def scaled_before_the_write(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n) * 0.5
    return o


@case("recover")
def rounded_twice_before_the_write(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n).bfloat16().to(pool.dtype)
    return o


@case("recover")
def written_and_returned(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    selected = select(states, n)
    pool[slots] = selected
    return o, selected + 1


@case("recover")
def pool_changed_between_read_and_write(pool, slots, q, k, v, g, beta, n):
    S = pool[slots]
    pool.mul_(2)
    o, states = run_window(S, q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def pool_changed_before_the_read(pool, slots, q, k, v, g, beta, n):
    pool.mul_(0.5)
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def pool_read_again_after_the_window(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    before = pool.sum((1, 2, 3))
    pool[slots] = select(states, n)
    return o, before, pool.mean((1, 2, 3))


@case("commit")
def negative_slots(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots - SLOTS], q, k, v, g, beta)
    pool[slots - SLOTS] = select(states, n)
    return o


@case("commit")
def slots_and_positions_in_int32(pool, slots, q, k, v, g, beta, n):
    slots, n = slots.int(), n.int()
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def positions_counted_from_the_end(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = states[torch.arange(B), n - 1 - T]
    return o


@case("commit")
def no_token_accepted_means_the_last_as_indexing_has_it(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = states[torch.arange(B), n - n - 1]
    return o


@case("commit")
def positions_clamped(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = states[torch.arange(B), (2 * n - 1).clamp(0, T - 1)]
    return o


@case("commit")
def one_position_for_all_rows(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = states.index_select(1, n[:1] - 1).squeeze(1)
    return o


@case("recover", lambda: make_inputs(H=3))
def one_position_per_head(pool, slots, q, k, v, g, beta, n):
    """Heads and rows may change roles: nothing else tells them apart."""
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = states[:, n - 1, torch.arange(3)]
    return o


@case("recover")
def rows_times_heads_in_one_axis(pool, slots, q, k, v, g, beta, n):
    q, k, v, g, beta = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, g, beta))
    o, states = run_window(pool[slots].flatten(0, 1), q, k, v, g, beta)
    selected = states[torch.arange(states.shape[0]), n.repeat_interleave(2) - 1]
    pool[slots] = selected.unflatten(0, (-1, 2))
    return o


@case("recover")
def heads_before_rows(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots].transpose(0, 1).contiguous(), [], []
    q, k, v, g, beta = (x.transpose(0, 2) for x in (q, k, v, g, beta))  # [H, T, B, ...]
    for t in range(T):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    selected = torch.stack(states, 0)[n - 1, :, torch.arange(B)]  # [B, H, V, K]
    pool[slots] = selected
    return torch.stack(outs, 1)


CASES["heads_before_rows"] = ("commit", *CASES["heads_before_rows"][1:])


@case("commit")
def grouped_heads(pool, slots, q, k, v, g, beta, n):
    q, k = (x[:, :, :1].repeat_interleave(2, 2) for x in (q, k))
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("recover")
def one_pool_for_several_layers(pool, slots, q, k, v, g, beta, n):
    pools = pool.view(1, *pool.shape)
    o, states = run_window(pools[0][slots], q, k, v, g, beta)
    pools[0, slots] = select(states, n)
    return o


CASES["one_pool_for_several_layers"] = (None, *CASES["one_pool_for_several_layers"][1:])


@case("recover")
def state_of_a_fixed_slot(pool, slots, q, k, v, g, beta, n):
    S = pool[2:3]
    o, states = run_window(S, q[:1], k[:1], v[:1], g[:1], beta[:1])
    pool[2:3] = states[torch.arange(1), n[:1] - 1]
    return o


@pytest.mark.parametrize(("name", "dynamic"), CASES.parameters(), ids=kind)
def test_layout(name, dynamic):
    check_layout(*CASES[name], dynamic)


def test_two_layers_that_share_a_pool():
    """The second layer reads, from its own slots, what the first has just written to others."""
    first, second = make_inputs(), make_inputs()
    pool = first[0]
    slots = torch.tensor([0, 3, 2]), torch.tensor([4, 3, 1])

    def step(pool, first, second):
        o, states = run_window(pool[slots[0]], *first[2:7])
        pool[slots[0]] = select(states, first[7])
        o2, states = run_window(pool[slots[1]], *second[2:7])
        pool[slots[1]] = select(states, second[7])
        return o, o2

    expected_pool = copied(pool)
    expected = step(expected_pool, first, second)
    result, seen = run_rewritten(step, pool, first, second)
    assert [layer.form for layer in seen.report.layers] == ["commit", "commit"]
    torch.testing.assert_close((result, pool), (expected, expected_pool))


def test_head_size_in_a_dynamic_dimension_stays_within_the_operators_limit():
    """A graph traced with small heads is not used for heads that the operators do not take."""

    def step(pool, slots, q, k, v, g, beta, n):
        o, states = run_window(pool[slots], q, k, v, g, beta)
        pool[slots] = select(states, n)
        return o

    small, large = make_inputs(K=8), make_inputs(K=300)
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(step, dynamic=True)
    expected_args = copied(large)
    with torch.no_grad():
        compiled(*small)
        result = compiled(*large)
    assert [report.matched for report in seen.reports] == [1, 0]
    torch.testing.assert_close((result, large[0]), (step(*expected_args), expected_args[0]))


@pytest.mark.parametrize("sizes", [{"K": 1}, {"V": 1}, {"K": 1, "V": 1, "H": 1}], ids=str)
def test_head_sizes_of_one_are_left_alone(sizes):
    """An axis of one position cannot be told from the others."""

    def step(pool, slots, q, k, v, g, beta, n):
        o, states = run_window(pool[slots], q, k, v, g, beta)
        pool[slots] = select(states, n)
        return o

    args, expected = make_inputs(**sizes), make_inputs(**sizes)
    result, seen = run_rewritten(step, *args)
    assert seen.untouched and seen.report.refused == 1
    torch.testing.assert_close((result, args[0]), (step(*expected), expected[0]))


@pytest.mark.parametrize("written", [True, False], ids=["pool", "functional"])
def test_batch_without_a_size_hint(written):
    """Unbacked sizes, as data-dependent code makes them."""

    def step(pool, slots, q, k, v, g, beta, n):
        o, states = run_window(pool[slots], q, k, v, g, beta)
        if not written:
            return o, select(states, n)
        pool[slots] = select(states, n)
        return o

    args, expected = make_inputs(), make_inputs()
    for x in args[1:]:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    result, seen = run_rewritten(step, *args)
    assert [layer.form for layer in seen.report.layers] == ["commit" if written else "recover"]
    torch.testing.assert_close((result, args[0]), (step(*expected), expected[0]))

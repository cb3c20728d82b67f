"""Look-alikes of the recurrence are left alone, with the reason, and go on computing what they did.

Every case is the layer of :func:`layer` with one thing changed. A wrong rewrite would compute the unchanged layer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rewriting import DROPS_ROUND_TRIPS, copied, run_rewritten
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_passes import REASONS

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


CASES: dict[str, tuple[str, Callable, Callable]] = {}


def case(reason: str, inputs: Callable = make_inputs, **around):
    """A step that must be refused for ``reason``; ``around`` changes the layer outside the step."""

    def add(step):
        CASES[step.__name__] = (reason, layer(step, **around), inputs)
        return step

    return add


def after(name: str, reason: str, inputs: Callable = make_inputs, step: Callable = plain_step, **around) -> None:
    CASES[name] = (reason, layer(step, **around), inputs)


# --- the decay ----------------------------------------------------------------------------------------------------------


@case("gate_mismatch", lambda: make_inputs(K=6))
def gate_on_the_value_axis(S, q, k, v, g, beta):
    S = S * g.exp().unsqueeze(-1)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@case("gate_mismatch")
def decay_by_a_sigmoid(S, q, k, v, g, beta):
    S = S * g.sigmoid().unsqueeze(-2)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@case("gate_mismatch")
def decay_by_two_exponentials(S, q, k, v, g, beta):
    S = decay(decay(S, g), g.square())
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@case("gate_mismatch")
def decay_by_a_power_of_two(S, q, k, v, g, beta):
    S = S * torch.exp2(g).unsqueeze(-2)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@case("write_before_delta")
def delta_before_decay(S, q, k, v, g, beta):
    S = write(decay(S, g), correction(S, k, v, beta), k)
    return S, read(S, q)


@case("gate_mismatch")
def delta_sees_a_part_of_the_decay(S, q, k, v, g, beta):
    once = decay(S, g)
    S = write(decay(once, g), correction(once, k, v, beta), k)
    return S, read(S, q)


@case("key_mismatch")
def delta_sees_another_decay(S, q, k, v, g, beta):
    S = write(decay(S, g), correction(decay(decay(S, g), g), k, v, beta), k)
    return S, read(S, q)


@case("non_uniform_step")
def decay_after_the_write(S, q, k, v, g, beta):
    S = decay(write(S, correction(S, k, v, beta), k), g)
    return S, read(S, q)


# --- the correction -----------------------------------------------------------------------------------------------------


@case("missing_delta")
def gated_linear_attention(S, q, k, v, g, beta):
    S = write(decay(S, g), beta.unsqueeze(-1) * v, k)
    return S, read(S, q)


@case("non_uniform_step")
def delta_with_a_plus(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v + read(S, k)), k)
    return S, read(S, q)


@case("non_uniform_step")
def half_a_delta(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v - 0.5 * read(S, k)), k)
    return S, read(S, q)


@case("non_uniform_step")
def update_subtracted(S, q, k, v, g, beta):
    S = decay(S, g)
    S = S - correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2)
    return S, read(S, q)


@case("key_mismatch")
def other_key_in_the_update(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), q)
    return S, read(S, q)


@case("key_mismatch")
def update_with_the_key_twice_as_long(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, 2.5 * k, v, beta), k)
    return S, read(S, q)


@case("key_mismatch")
@looks_around
def shifted_key_in_the_update(S, q, k, v, g, beta, t, window, outs):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), window[1][:, t - 1])
    return S, read(S, q)


@case("non_uniform_step")
def step_size_by_key_channel(S, q, k, v, g, beta):
    S = decay(S, g)
    S = S + correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2) * g.unsqueeze(-2)
    return S, read(S, q)


@case("non_uniform_step")
def value_depends_on_the_key_axis(S, q, k, v, g, beta):
    S = decay(S, g)
    u = v.unsqueeze(-1) + k.unsqueeze(-2) - read(S, k).unsqueeze(-1)
    return S + u * k.unsqueeze(-2), read(S, q)


@case("non_uniform_step")
def key_outside_of_the_sum(S, q, k, v, g, beta):
    """``v - k_k sum_c S_vc`` reads like ``v - sum_k S_vk k_k`` if the two k are taken for one."""
    S = decay(S, g)
    u = v.unsqueeze(-1) - k.unsqueeze(-2) * S.sum(-1, keepdim=True)
    return S + beta[..., None, None] * u * k.unsqueeze(-2), read(S, q)


@case("non_uniform_step")
def extra_constant(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), k) + 0.25
    return S, read(S, q)


@case("non_uniform_step")
def extra_term(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), k) + q.unsqueeze(-2)
    return S, read(S, q)


@case("non_uniform_step")
def update_scaled(S, q, k, v, g, beta):
    S = decay(S, g)
    S = S + 1.5 * correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2)
    return S, read(S, q)


@case("non_uniform_step")
@looks_around
def one_odd_step(S, q, k, v, g, beta, t, window, outs):
    S = decay(S, g)
    u = correction(S, k, v, beta)
    S = write(S, u.tanh() if t == 1 else u, k)
    return S, read(S, q)


@case("gate_mismatch")
@looks_around
def one_step_without_decay(S, q, k, v, g, beta, t, window, outs):
    S = S if t == 1 else decay(S, g)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@case("non_uniform_step")
@looks_around
def one_output_scaled_otherwise(S, q, k, v, g, beta, t, window, outs):
    S, o = plain_step(S, 2.0 * q, k, v, g, beta)
    return S, (S * q.unsqueeze(-2) * 3.0).sum(-1) if t == 1 else o


@case("non_uniform_step")
def delta_with_the_transposed_state(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v - (S.transpose(-1, -2) * k.unsqueeze(-2)).sum(-1)), k)
    return S, read(S, q)


CASES["delta_with_the_transposed_state"] = (*CASES["delta_with_the_transposed_state"][:2], lambda: make_inputs(K=6))


@case("non_uniform_step", lambda: make_inputs(H=3))
def heads_and_rows_exchanged(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v - read(S, k).transpose(0, 1)), k)
    return S, read(S, q)


# --- the outputs --------------------------------------------------------------------------------------------------------


@case("missing_output")
def output_from_the_old_state(S, q, k, v, g, beta):
    o = read(S, q)
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, o


@case("missing_output")
def output_from_the_decayed_state(S, q, k, v, g, beta):
    S = decay(S, g)
    return write(S, correction(S, k, v, beta), k), read(S, q)


@case("state_escapes")
def two_queries(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S, o + read(S, k.cos())


@case("state_escapes")
def state_summed(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S, o + S.sum((-1, -2)).unsqueeze(-1)


@case("missing_output")
def query_on_the_value_axis(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S * v.unsqueeze(-1)).sum(-2)


@case("missing_output")
def many_queries_at_once(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    queries = torch.stack([q, k.sin()], -2)
    return S, torch.einsum("bhvk,bhjk->bhjv", S, queries)


@case("missing_output")
def output_repeated_in_a_new_axis(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.unsqueeze(-1).expand(-1, -1, -1, -1, 4) * q[:, :, None, :, None]).sum(-2)


@case("missing_output")
def output_squared(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.square() * q.unsqueeze(-2)).sum(-1)


@case("depends_on_output")
@looks_around
def query_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q + outs[-1].mean(-1, keepdim=True) if outs else q, k, v, g, beta)


@case("depends_on_output")
@looks_around
def value_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, (v * outs[-1]).relu() if outs else v, g, beta)


@case("depends_on_output")
@looks_around
def key_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, (k + outs[-1].mean(-1, keepdim=True)).tanh() if outs else k, v, g, beta)


@case("depends_on_output")
@looks_around
def decay_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, v, g - outs[-1].mean(-1, keepdim=True).square() if outs else g, beta)


@case("depends_on_output")
@looks_around
def step_size_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, v, g, (beta + outs[-1].mean(-1)).sigmoid() if outs else beta)


# --- precision ----------------------------------------------------------------------------------------------------------


@case("rounded_between_steps")
def rounded_between_steps(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S.bfloat16().float(), o


@case("rounded_between_steps")
def correction_rounded(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta).half().float(), k)
    return S, read(S, q)


@case("missing_output")
def output_in_low_precision(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.bfloat16() * q.bfloat16().unsqueeze(-2)).sum(-1)


def in_bfloat16():
    return make_inputs(dtype=torch.bfloat16)


after("recurrence_in_bfloat16", "unsupported_dtype", in_bfloat16, start=lambda S: S)
after("recurrence_in_float64", "unsupported_dtype", start=torch.Tensor.double)


@case("unsupported_dtype")
def inputs_in_float64(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v.double(), g, beta)
    return S, read(S, q)


after("states_rounded_into_the_stack", "rounded_between_steps", finish=lambda s, n: select(s, n))


@case("rounded_between_steps")
def products_in_bfloat16(S, q, k, v, g, beta):
    with torch.autocast("cpu", torch.bfloat16):
        S = decay(S, g)
        u = beta.unsqueeze(-1) * (v - torch.einsum("bhvk,bhk->bhv", S, k))
        S = S + u.unsqueeze(-1) * k.unsqueeze(-2)
    return S, read(S, q)


# --- the states and their selection -------------------------------------------------------------------------------------

after("state_returned", "state_escapes", finish=lambda states, n: (select(states, n), states[:, 0] * 1))
after("all_states_returned", "state_escapes", finish=lambda states, n: (select(states, n), states))
after("states_only_returned", "no_selection", finish=lambda s, n: (torch.zeros(s.shape[0], *s.shape[2:]), s))
after("states_selected_twice", "state_escapes", finish=lambda s, n: (select(s, n), select(s, n.flip(0))))
after("last_state_returned_too", "state_escapes", finish=lambda s, n: (select(s, n), s[:, -1] + 1))
after("always_the_last_state", "state_escapes", finish=lambda s, n: s[:, -1])
after("mean_of_states", "state_escapes", finish=lambda s, n: s.mean(1))
after(
    "masked_sum_of_states", "state_escapes", finish=lambda s, n: (s * (n[:, None] == 1)[..., None, None, None]).sum(1)
)


def per_head_position(states, n):
    rows, heads = torch.arange(B)[:, None], torch.arange(H)
    return states[rows, (n[:, None] + heads) % T, heads]


def per_value_position(states, n):
    index = ((n[:, None] + torch.arange(V)) % T).view(B, 1, 1, V, 1).expand(-1, -1, H, -1, K)
    return states.gather(1, index).squeeze(1)


after("position_per_row_and_head", "selection_not_per_row", finish=per_head_position)
after("position_per_row_and_value_channel", "selection_not_per_row", finish=per_value_position)
after(
    "rows_exchanged_by_the_selection",
    "selection_not_per_row",
    finish=lambda s, n: s[torch.tensor([2, 0, 1]), n - 1],
)
after("rows_looked_up", "selection_not_per_row", finish=lambda s, n: s[n - 1, n - 1])
after("shifted_rows", "selection_not_per_row", finish=lambda s, n: s.roll(1, 0)[torch.arange(B), n - 1])


def same_position_repeated(states, n):
    """[B, 4, H, V, K]: one position a row, in a new axis that nothing varies with."""
    chosen = states[torch.arange(B)[:, None], (n - 1)[:, None].expand(-1, 4)]
    return chosen[:, 3] * 1


after("selection_in_a_new_axis", "selection_not_per_row", finish=same_position_repeated)


def part_of_the_heads(states, n):
    index = (n - 1).view(B, 1, 1, 1, 1).expand(-1, 1, 1, V, K)
    return states.gather(1, index).squeeze(1).expand(-1, H, -1, -1)


after("selection_of_a_part_of_the_heads", "selection_not_per_row", finish=part_of_the_heads)

# --- sizes --------------------------------------------------------------------------------------------------------------

after("window_of_17", "window_too_long", lambda: make_inputs(T=17, K=4, V=4))
after("key_size_257", "head_too_large", lambda: make_inputs(K=257, B=2, T=2))
after("value_size_257", "head_too_large", lambda: make_inputs(V=257, B=2, T=2))


def five_dimensions(pool, slots, q, k, v, g, beta, n):
    """The heads as two axes."""
    S, outs, states = pool[slots].unflatten(1, (2, 2)), [], []
    q, k, v, g, beta = (x.unflatten(2, (2, 2)) for x in (q, k, v, g, beta))
    for t in range(q.shape[1]):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    selected = select(torch.stack(states, 1), n)
    pool[slots] = selected.flatten(1, 2)
    return torch.stack(outs, 1), None


CASES["heads_in_two_axes"] = ("unsupported_layout", five_dimensions, lambda: make_inputs(H=4))


def states_rounded_into_the_stack(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(q.shape[1]):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S.bfloat16())
    selected = select(torch.stack(states, 1), n)
    pool[slots] = selected.float()
    return torch.stack(outs, 1), None


CASES["states_rounded_into_the_stack"] = ("rounded_between_steps", states_rounded_into_the_stack, make_inputs)


# Dynamic tracing is slow, and the reasons that depend on sizes are few: a quarter of the cases has to do.
BOTH = [(name, False) for name in CASES] + [(name, True) for name in list(CASES)[::4]]


@pytest.mark.parametrize(("name", "dynamic"), BOTH, ids=lambda x: {False: "static", True: "dynamic"}.get(x, x))
def test_b29_look_alike_is_left_alone(name, dynamic):
    reason, fn, inputs = CASES[name]
    args = inputs()
    expected_args = copied(args)
    result, seen = run_rewritten(fn, *args, dynamic=dynamic)
    if reason == "rounded_between_steps" and not seen.rounds:
        pytest.skip(DROPS_ROUND_TRIPS)
    expected = fn(*expected_args)
    # Where an output feeds the next token, the outputs are a chain of their own and reported as well.
    assert seen.report.matched == 0 and reason in [layer.reason for layer in seen.report.layers]
    assert seen.untouched
    for x, y in zip(*map(pytree.tree_leaves, ((result, args[0]), (expected, expected_args[0]))), strict=True):
        torch.testing.assert_close(x, y)  # the very operations of the original, but for rounding of its decompositions


def test_every_reason_is_met_by_a_look_alike():
    assert {reason for reason, _, _ in CASES.values()} == set(REASONS)


def test_every_reason_says_what_to_do():
    for reason, text in REASONS.items():
        assert reason.isidentifier() and len(text) > 20

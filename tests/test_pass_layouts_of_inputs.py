"""The same layer on inputs that are shared, repeated, broadcast or computed otherwise, and steps that are the same algebra.

Whatever the pass rewrites here has to compute what the original did; most of it it should rewrite.
"""

import pytest
import torch
from layouts import Layouts, check_layout, kind, run_window
from plain_layers import B, T, correction, decay, make_inputs, plain_step, read, select, write

CASES = Layouts()
case = CASES.case


@case("commit")
def tokens_stacked_first(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, stack_dim=0)
    pool[slots] = states[n - 1, torch.arange(B)]
    return o


@case("commit")
def tokens_stacked_last(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, stack_dim=-1)
    pool[slots] = states.gather(-1, (n - 1).view(B, 1, 1, 1, 1).expand(*states.shape[:-1], 1)).squeeze(-1)
    return o


@case("commit")
def tokens_in_reverse(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, order=range(T - 1, -1, -1))
    pool[slots] = select(states, n)
    return o


@case("commit")
def tokens_counted_from_the_end(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, order=range(-T, 0))
    pool[slots] = select(states, n)
    return o


@case("commit")
def tokens_out_of_order(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, order=(1, 0, 2))
    pool[slots] = select(states, n)
    return o


@case("commit")
def one_token_three_times(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, order=(1, 1, 1))
    pool[slots] = select(states, n)
    return o


@case("commit", lambda: make_inputs(T=5))
def part_of_a_longer_window(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, k, v, g, beta, order=(1, 2, 3))
    pool[slots] = states[torch.arange(B), (n - 1) % 3]
    return o


@case("commit")
def tokens_of_all_rows_in_one_axis(pool, slots, q, k, v, g, beta, n):
    """[B * T, ...], as packed models have it."""
    packed = (x.flatten(0, 1) * 1 for x in (q, k, v, g, beta))
    o, states = run_window(pool[slots], *(x.unflatten(0, (-1, T)) for x in packed))
    pool[slots] = select(states, n)
    return o.flatten(0, 1)


@case("commit", lambda: make_inputs(K=6))
def one_tensor_for_q_k_and_v(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], k, k, k, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit", lambda: make_inputs(K=6))
def value_is_gate_and_key(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q, g, g, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def inputs_broadcast_over_rows_and_heads(pool, slots, q, k, v, g, beta, n):
    o, states = run_window(pool[slots], q[:1], k[:, :, :1], v[:1, :, :1], g[:1, :, :1], beta[:, :, :1])
    pool[slots] = select(states, n)
    return o


@case("commit")
def inputs_alike_for_all_tokens(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for _ in range(T):
        S, o = plain_step(S, q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0])
        outs.append(o)
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit")
def constant_step_size(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S = decay(S, g[:, t])
        S = write(S, v[:, t] - read(S, k[:, t]), k[:, t])
        outs.append(read(S, q[:, t]))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit")
def step_size_in_two_factors(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S = decay(S, g[:, t])
        u = beta[:, t].unsqueeze(-1) * correction(S, k[:, t], v[:, t], beta[:, t].cos())
        S = write(S, u, k[:, t])
        outs.append(3.0 * read(S, q[:, t]))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit")
def bias_of_a_scalar_gate_per_channel(pool, slots, q, k, v, g, beta, n):
    """The raw gate has no key axis, its bias does."""
    A, bias = k[0, 0, :, 0], k[0, 0]
    log_decay = -A.exp()[:, None] * torch.nn.functional.softplus(g[..., :1] + bias)
    o, states = run_window(pool[slots], q, k, v, log_decay, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def gate_with_one_rate_for_all_heads(pool, slots, q, k, v, g, beta, n):
    log_decay = -2.0 * torch.sigmoid(k[0, 0, 0, 0].exp() * (g + k[0, 0, 0]))
    o, states = run_window(pool[slots], q, k, v, log_decay, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def gate_that_differs_between_tokens(pool, slots, q, k, v, g, beta, n):
    bounds = (-1.0, -2.0, -3.0)
    log_decay = torch.stack([bound * torch.sigmoid(g[:, t]) for t, bound in enumerate(bounds)], 1)
    o, states = run_window(pool[slots], q, k, v, log_decay, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def query_scale_that_differs_between_tokens(pool, slots, q, k, v, g, beta, n):
    q = torch.stack([q[:, t] * (t + 1.0) for t in range(T)], 1)
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def norm_over_heads_too(pool, slots, q, k, v, g, beta, n):
    q, k = (x * torch.rsqrt(x.square().sum((-1, -2), keepdim=True) + 1e-6) for x in (q, k))
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit", lambda: make_inputs(H=8))
def norm_over_heads_where_there_are_as_many_as_channels(pool, slots, q, k, v, g, beta, n):
    q, k = (x * torch.rsqrt(x.square().sum(-2, keepdim=True) + 1e-6) for x in (q, k))
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def norm_of_another_tensor(pool, slots, q, k, v, g, beta, n):
    root = torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    o, states = run_window(pool[slots], q * root, k * root, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def norm_with_another_epsilon(pool, slots, q, k, v, g, beta, n):
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-2) for x in (q, k))
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def norm_of_mean_squares(pool, slots, q, k, v, g, beta, n):
    q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * 0.2 for x in (q, k))
    o, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def gated_linear_attention(pool, slots, q, k, v, g, beta, n):
    """No delta: what is added is an input."""
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S = write(decay(S, g[:, t]), beta[:, t].unsqueeze(-1) * v[:, t], k[:, t])
        outs.append(read(S, q[:, t]))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit")
def decay_by_a_power_of_two(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S = S * torch.exp2(g[:, t]).unsqueeze(-2)
        S = write(S, correction(S, k[:, t], v[:, t], beta[:, t]), k[:, t])
        outs.append(read(S, q[:, t]))
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


def with_update(update):
    def step(pool, slots, q, k, v, g, beta, n):
        S, outs, states = pool[slots], [], []
        for t in range(T):
            S = update(decay(S, g[:, t]), k[:, t], v[:, t], beta[:, t])
            outs.append(read(S, q[:, t]))
            states.append(S)
        pool[slots] = select(torch.stack(states, 1), n)
        return torch.stack(outs, 1)

    return step


@case("commit")
@with_update
def half_a_delta(S, k, v, beta):
    """A step of half the size towards twice the value."""
    return write(S, beta.unsqueeze(-1) * (v - 0.5 * read(S, k)), k)


@case("commit")
@with_update
def update_scaled(S, k, v, beta):
    return S + 0.5 * correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2)


@case("commit")
@with_update
def step_size_multiplied_into_key_and_value(S, k, v, beta):
    k_beta, v_beta = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    return S + (v_beta - read(S, k_beta)).unsqueeze(-1) * k.unsqueeze(-2)


@case("commit")
def output_from_the_old_state(pool, slots, q, k, v, g, beta, n):
    """Each token reads the state before it: of the window's states all but the last are read, by the next query."""
    S, outs, states = pool[slots], [], []
    for t in range(T):
        outs.append(read(S, q[:, t]))
        S, _ = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        states.append(S)
    pool[slots] = select(torch.stack(states, 1), n)
    return torch.stack(outs, 1)


@case("commit")
def no_outputs(pool, slots, q, k, v, g, beta, n):
    _, states = run_window(pool[slots], q, k, v, g, beta)
    pool[slots] = select(states, n)
    return q + 1


@case("recover")
def states_rounded_into_the_stack(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S.bfloat16())
    pool[slots] = select(torch.stack(states, 1), n).to(pool.dtype)
    return torch.stack(outs, 1)


@case("recover")
def new_requests_start_from_zeros(pool, slots, q, k, v, g, beta, n):
    S = pool[slots] * (slots > 1).view(-1, 1, 1, 1)
    o, states = run_window(S, q, k, v, g, beta)
    pool[slots] = select(states, n)
    return o


@case("commit")
def rows_that_accept_nothing_keep_their_state(pool, slots, q, k, v, g, beta, n):
    S0, n = pool[slots], n - 1
    o, states = run_window(S0, q, k, v, g, beta)
    pool[slots] = torch.where((n > 0).view(-1, 1, 1, 1), states[torch.arange(B), (n - 1).clamp(min=0)], S0)
    return o


@pytest.mark.parametrize(("name", "dynamic"), CASES.parameters(), ids=kind)
def test_layout(name, dynamic):
    check_layout(*CASES[name], dynamic)

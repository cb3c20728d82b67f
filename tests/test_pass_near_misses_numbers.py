"""Look-alikes by precision and size."""

import pytest
import torch
from near_misses import Corpus, check_left_alone, kind
from plain_layers import correction, decay, make_inputs, plain_step, read, select, write

from compile_passes import REASONS

CORPUS = Corpus()


@CORPUS.case("rounded_between_steps")
def rounded_between_steps(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S.bfloat16().float(), o


@CORPUS.case("rounded_between_steps")
def correction_rounded(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta).half().float(), k)
    return S, read(S, q)


@CORPUS.case("missing_output")
def output_in_low_precision(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.bfloat16() * q.bfloat16().unsqueeze(-2)).sum(-1)


def in_bfloat16():
    return make_inputs(dtype=torch.bfloat16)


CORPUS.after("recurrence_in_bfloat16", "unsupported_dtype", in_bfloat16, start=lambda S: S)
CORPUS.after("recurrence_in_float64", "unsupported_dtype", start=torch.Tensor.double)


@CORPUS.case("unsupported_dtype")
def inputs_in_float64(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v.double(), g, beta)
    return S, read(S, q)


@CORPUS.case("rounded_between_steps")
def products_in_bfloat16(S, q, k, v, g, beta):
    with torch.autocast("cpu", torch.bfloat16):
        S = decay(S, g)
        u = beta.unsqueeze(-1) * (v - torch.einsum("bhvk,bhk->bhv", S, k))
        S = S + u.unsqueeze(-1) * k.unsqueeze(-2)
    return S, read(S, q)


# --- sizes ---


CORPUS.after("window_of_17", "window_too_long", lambda: make_inputs(T=17, K=4, V=4))
CORPUS.after("key_size_257", "head_too_large", lambda: make_inputs(K=257, B=2, T=2))
CORPUS.after("value_size_257", "head_too_large", lambda: make_inputs(V=257, B=2, T=2))


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


CORPUS["heads_in_two_axes"] = ("unsupported_layout", five_dimensions, lambda: make_inputs(H=4))


def test_every_reason_is_met_by_a_look_alike():
    from test_pass_near_misses_exits import CORPUS as EXITS
    from test_pass_near_misses_steps import CORPUS as STEPS

    met = {reason for corpus in (CORPUS, EXITS, STEPS) for reason, _, _ in corpus.values()}
    assert met == set(REASONS)


def test_every_reason_says_what_to_do():
    for reason, text in REASONS.items():
        assert reason.isidentifier() and len(text) > 20


@pytest.mark.parametrize(("name", "dynamic"), CORPUS.parameters(), ids=kind)
def test_b29_look_alike_is_left_alone(name, dynamic):
    check_left_alone(*CORPUS[name], dynamic)

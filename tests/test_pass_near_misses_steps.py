"""Look-alikes of the recurrence: the decay, the correction."""

import pytest
from near_misses import Corpus, check_left_alone, kind
from plain_layers import correction, decay, looks_around, make_inputs, plain_step, read, write

CORPUS = Corpus()


@CORPUS.case("gate_mismatch", lambda: make_inputs(K=6))
def gate_on_the_value_axis(S, q, k, v, g, beta):
    S = S * g.exp().unsqueeze(-1)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("gate_mismatch")
def decay_by_a_sigmoid(S, q, k, v, g, beta):
    S = S * g.sigmoid().unsqueeze(-2)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("gate_mismatch")
def decay_by_two_exponentials(S, q, k, v, g, beta):
    S = decay(decay(S, g), g.square())
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("write_before_delta")
def delta_before_decay(S, q, k, v, g, beta):
    S = write(decay(S, g), correction(S, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("gate_mismatch")
def delta_sees_a_part_of_the_decay(S, q, k, v, g, beta):
    once = decay(S, g)
    S = write(decay(once, g), correction(once, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("key_mismatch")
def delta_sees_another_decay(S, q, k, v, g, beta):
    S = write(decay(S, g), correction(decay(decay(S, g), g), k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
def decay_after_the_write(S, q, k, v, g, beta):
    S = decay(write(S, correction(S, k, v, beta), k), g)
    return S, read(S, q)


# --- the correction ---


@CORPUS.case("non_uniform_step")
def delta_with_a_plus(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v + read(S, k)), k)
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
def update_subtracted(S, q, k, v, g, beta):
    S = decay(S, g)
    S = S - correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2)
    return S, read(S, q)


@CORPUS.case("key_mismatch")
def other_key_in_the_update(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), q)
    return S, read(S, q)


@CORPUS.case("key_mismatch")
@looks_around
def shifted_key_in_the_update(S, q, k, v, g, beta, t, window, outs):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), window[1][:, t - 1])
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
def step_size_by_key_channel(S, q, k, v, g, beta):
    S = decay(S, g)
    S = S + correction(S, k, v, beta).unsqueeze(-1) * k.unsqueeze(-2) * g.unsqueeze(-2)
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
def value_depends_on_the_key_axis(S, q, k, v, g, beta):
    S = decay(S, g)
    u = v.unsqueeze(-1) + k.unsqueeze(-2) - read(S, k).unsqueeze(-1)
    return S + u * k.unsqueeze(-2), read(S, q)


@CORPUS.case("key_mismatch")
def key_outside_of_the_sum(S, q, k, v, g, beta):
    """``v - k_k sum_c S_vc`` reads like ``v - sum_k S_vk k_k`` if the two k are taken for one."""
    S = decay(S, g)
    u = v.unsqueeze(-1) - k.unsqueeze(-2) * S.sum(-1, keepdim=True)
    return S + beta[..., None, None] * u * k.unsqueeze(-2), read(S, q)


@CORPUS.case("non_uniform_step")
def extra_constant(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), k) + 0.25
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
def extra_term(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, correction(S, k, v, beta), k) + q.unsqueeze(-2)
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
@looks_around
def one_odd_step(S, q, k, v, g, beta, t, window, outs):
    S = decay(S, g)
    u = correction(S, k, v, beta)
    S = write(S, u.tanh() if t == 1 else u, k)
    return S, read(S, q)


@CORPUS.case("gate_mismatch")
@looks_around
def one_step_without_decay(S, q, k, v, g, beta, t, window, outs):
    S = S if t == 1 else decay(S, g)
    S = write(S, correction(S, k, v, beta), k)
    return S, read(S, q)


@CORPUS.case("non_uniform_step")
@looks_around
def one_output_scaled_otherwise(S, q, k, v, g, beta, t, window, outs):
    S, o = plain_step(S, 2.0 * q, k, v, g, beta)
    return S, (S * q.unsqueeze(-2) * 3.0).sum(-1) if t == 1 else o


@CORPUS.case("non_uniform_step")
def delta_with_the_transposed_state(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v - (S.transpose(-1, -2) * k.unsqueeze(-2)).sum(-1)), k)
    return S, read(S, q)


CORPUS["delta_with_the_transposed_state"] = (*CORPUS["delta_with_the_transposed_state"][:2], lambda: make_inputs(K=6))


@CORPUS.case("non_uniform_step", lambda: make_inputs(H=3))
def heads_and_rows_exchanged(S, q, k, v, g, beta):
    S = decay(S, g)
    S = write(S, beta.unsqueeze(-1) * (v - read(S, k).transpose(0, 1)), k)
    return S, read(S, q)


@pytest.mark.parametrize(("name", "dynamic"), CORPUS.parameters(), ids=kind)
def test_b29_look_alike_is_left_alone(name, dynamic):
    check_left_alone(*CORPUS[name], dynamic)

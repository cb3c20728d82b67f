"""The recurrence in its three forms: a loop over a window, chunks of a sequence, windows of any lengths."""

import math

import pytest
import torch

from models.chunked import CHUNK, delta_rule_chunked
from models.config import KDAConfig
from models.layers import l2_normalize, log_decay
from models.model import KDAForCausalLM
from models.pools import Pools
from models.recurrence import delta_rule_window
from models.short_conv import causal_conv1d_sequence, causal_conv1d_window, history_after
from models.speculation import SpeculativeStep

TINY = KDAConfig(
    vocab_size=13,
    hidden_size=24,
    num_layers=4,
    num_heads=2,
    head_k_dim=8,
    head_v_dim=12,
    gate_rank=8,
    intermediate_size=32,
    max_length=64,
)


def inputs(T, g, seed=0, B=2, H=3, K=8, V=12):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = l2_normalize(normal(B, T, H, K)) * K**-0.5, l2_normalize(normal(B, T, H, K))
    beta = torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    return q, k, normal(B, T, H, V), g(normal(B, T, H, K)), beta, normal(B, H, V, K)


GATES = {
    "bounded": (lambda x: -5 * torch.sigmoid(x), -5.0),
    "bounded-at-its-floor": (lambda x: torch.full_like(x, -5.0), -5.0),
    "unbounded": (lambda x: -torch.nn.functional.softplus(x), None),
    # One token decays by e^-60 and more: factored exponentials would be infinite.
    "unbounded-strong": (lambda x: -60 * x.square(), None),
    "no-decay": (torch.zeros_like, -5.0),
}


def explicit_state(k, v, g, beta, S):
    """The state after every token from the definition, one head at a time, with matrices written out."""
    states = torch.empty(*k.shape[:3], v.shape[-1], k.shape[-1], dtype=torch.float64)
    for b in range(k.shape[0]):
        for h in range(k.shape[2]):
            state = S[b, h]
            for t in range(k.shape[1]):
                key = k[b, t, h]
                eye = torch.eye(len(key), dtype=torch.float64)
                transition = torch.diag(g[b, t, h].exp()) @ (eye - beta[b, t, h] * torch.outer(key, key))
                state = state @ transition + beta[b, t, h] * torch.outer(v[b, t, h], key)
                states[b, t, h] = state
    return states


def test_loop_is_the_definition():
    q, k, v, g, beta, S = inputs(9, GATES["bounded"][0])
    o, states = delta_rule_window(q, k, v, g, beta, S)
    expected = explicit_state(k, v, g, beta, S)
    torch.testing.assert_close(states, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, torch.einsum("bthvk,bthk->bthv", expected, q), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [1, CHUNK, 5 * CHUNK + 3])
def test_loop_in_float32_stays_near_float64(gate, T):
    x64 = inputs(T, GATES[gate][0])
    o, states = delta_rule_window(*(x.float() for x in x64))
    o64, states64 = delta_rule_window(*x64)
    # Every step is a contraction, so errors of a few ulp do not grow with T.
    assert (o - o64).abs().max() < 4e-6 * o64.abs().max()
    assert (states - states64).abs().max() < 4e-6 * states64.abs().max()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK, 8 * CHUNK, 11 * CHUNK + 5])
def test_chunked_equals_loop(gate, T):
    make, lower_bound = GATES[gate]
    x = inputs(T, make)
    o, end = delta_rule_chunked(*x, lower_bound=lower_bound)
    o_loop, states = delta_rule_window(*x)
    torch.testing.assert_close(o, o_loop, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(end, states[:, -1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gate", GATES)
def test_chunked_in_float32(gate):
    make, lower_bound = GATES[gate]
    x = inputs(6 * CHUNK, make)
    o64, states64 = delta_rule_window(*x)
    o, end = delta_rule_chunked(*(y.float() for y in x), lower_bound=lower_bound)
    # The factored exponents reach 40 in size, and exp turns their rounding into 40 ulp: hence more than the loop's.
    assert (o - o64).abs().max() < 1e-5 * o64.abs().max()
    assert (end - states64[:, -1]).abs().max() < 1e-5 * states64[:, -1].abs().max()


@pytest.mark.parametrize("gate", GATES)
def test_chunked_gradients_equal_the_loops(gate):
    make, lower_bound = GATES[gate]
    x = [y.requires_grad_() for y in inputs(2 * CHUNK + 3, make)]
    o, end = delta_rule_chunked(*x, lower_bound=lower_bound)
    o_loop, states = delta_rule_window(*x)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chunked = torch.autograd.grad((o * weight).sum() + end.square().sum(), x)
    loop = torch.autograd.grad((o_loop * weight).sum() + states[:, -1].square().sum(), x)
    for name, a, b in zip(["q", "k", "v", "g", "beta", "S"], chunked, loop, strict=True):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_log_decay_formula(lower_bound):
    f, A_log, dt_bias = torch.randn(2, 3, 4, 5), torch.randn(4), torch.randn(20)
    g = log_decay(f, A_log, dt_bias, lower_bound)
    for h in range(4):
        for c in range(5):
            x, a = f[1, 2, h, c].item() + dt_bias[5 * h + c].item(), math.exp(A_log[h].item())
            expected = -a * math.log1p(math.exp(x)) if lower_bound is None else lower_bound / (1 + math.exp(-a * x))
            assert g[1, 2, h, c].item() == pytest.approx(expected, rel=1e-5)


def test_short_convolution_in_windows_equals_the_sequence():
    x, weight = torch.randn(2, 11, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    whole = causal_conv1d_sequence(x, weight)
    history, parts, start = torch.zeros(2, 6, 3, dtype=torch.float64), [], 0
    for length in (1, 2, 5, 3):
        y, extended = causal_conv1d_window(x[:, start : start + length], history, weight)
        history = history_after(extended, torch.full((2,), length), width=4)
        parts.append(y)
        start += length
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(history, x[:, -3:].transpose(1, 2))


def window_logits(model, tokens, lengths):
    """Logits of a sequence taken in windows of the given lengths, every token forced."""
    batch = tokens.shape[0]
    pools = Pools(model.config, batch, tokens.shape[1] + max(lengths), dtype=torch.float64)
    step, start, parts = SpeculativeStep(model, pools), 0, []
    slots = torch.arange(batch).flip(0)
    for length in lengths:
        window, positions = tokens[:, start : start + length], torch.full((batch,), start)
        logits, _ = model.window(window, positions, slots, pools)
        parts.append(logits)
        forced = torch.full((batch,), length - 1)
        noise = torch.zeros(batch, length), torch.ones(batch, model.config.vocab_size)
        _, num_accepted = step(window, forced, forced, positions, slots, torch.zeros(batch), *noise)
        assert num_accepted.tolist() == [length] * batch
        start += length
    return torch.cat(parts, 1)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_windows_of_any_lengths_equal_token_by_token_and_the_parallel_form(lower_bound):
    torch.manual_seed(3)
    config = KDAConfig(**{**TINY.__dict__, "lower_bound": lower_bound})
    model = KDAForCausalLM(config).double().eval().requires_grad_(False)
    tokens = torch.randint(13, (3, 21))
    one_by_one = window_logits(model, tokens, [1] * 21)
    for lengths in ([21], [8, 8, 5], [2, 7, 1, 1, 9, 1]):
        # States are kept in float32 between windows, and logits are float32.
        torch.testing.assert_close(window_logits(model, tokens, lengths), one_by_one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(tokens), one_by_one, rtol=1e-5, atol=1e-5)

"""The oracle itself, against forms that share nothing with it: matrix products, arithmetic by hand, special cases."""

import math

import pytest
import torch
import torch.nn.functional as F
from budget import relative_error
from pools import SETTINGS_OF_THE_ORACLE, make_window

from recoverssm_ops.reference import recurrence

EXACT = 1e-12  # two float64 evaluations of a few dozen products


def normal_state(value_heads=2):
    return torch.randn(value_heads, 6, 8, generator=torch.Generator().manual_seed(2))


def explicit_products(q, k, v, g, beta, S0, **options):
    """``S_n = S_0 M_1..M_n + sum_j beta_j v_j k_j^T M_{j+1}..M_n``, ``M_i = Diag(exp g_i) (I - beta_i k_i k_i^T)``."""
    q, k, v, g, beta, S0 = (x.double() for x in (q, k, v, g, beta, S0))
    T, HV, V = v.shape
    K = k.shape[-1]
    scalar = g.ndim == 2
    groups = HV // k.shape[1]
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).pow(0.5) for x in (q, k))
    q, k = (torch.stack([x[:, h // groups] for h in range(HV)], 1) for x in (q, k))
    if options.get("use_gate_in_kernel"):
        A_log, dt_bias, bound = options["A_log"], options["dt_bias"], options["lower_bound"]
        if dt_bias is not None:
            g = g + (dt_bias.double() if scalar else dt_bias.double().view(HV, K))
        rate = torch.ones(HV).double() if A_log is None else A_log.double().exp()
        rate = rate if scalar else rate[:, None]
        g = -rate * F.softplus(g) if bound is None else bound * torch.exp(F.logsigmoid(rate * g))
    g = g[..., None].expand(T, HV, K) if scalar else g
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = torch.exp(F.logsigmoid(beta))
    if options.get("allow_neg_eigval"):
        beta = beta + beta
    scale = options.get("scale") or 1 / math.sqrt(K)

    eye = torch.eye(K).double()
    states = torch.empty(T + 1, HV, V, K).double()
    for h in range(HV):
        M = [torch.diag(g[i, h].exp()) @ (eye - beta[i, h] * torch.outer(k[i, h], k[i, h])) for i in range(T)]
        for n in range(T + 1):
            total = S0[h] @ torch.linalg.multi_dot([eye, eye, *M[:n]])
            for j in range(n):
                write = beta[j, h] * torch.outer(v[j, h], k[j, h])
                total = total + write @ torch.linalg.multi_dot([eye, eye, *M[j + 1 : n]])
            states[n, h] = total
    o = scale * torch.einsum("thvk,thk->thv", states[1:], q)
    read = torch.einsum("thvk,thk->thv", states[:-1] * g.exp().unsqueeze(-2), k)
    return o, beta[..., None] * (v - read), states


@pytest.mark.parametrize("beta", ["plain", "sigmoid", "neg_eigval"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["raw", "l2norm"])
@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("gate", ["bounded", "unbounded", "precomputed"])
def test_recurrence_is_the_product_of_its_transition_matrices(gate, scalar, l2norm, beta):
    window = make_window(1, 6, heads=2, value_heads=4, gate=gate, scalar_gate=scalar, l2norm=l2norm, beta=beta, seed=1)
    S0 = normal_state(value_heads=4)
    options = {name: x for name, x in window.options.items() if name in SETTINGS_OF_THE_ORACLE}
    row = [x[0] for x in window.inputs]
    mine, theirs = recurrence(*row, S0, **options), explicit_products(*row, S0, **options)
    for name, x, y in zip("ouS", mine, theirs, strict=True):
        assert x.dtype == torch.float64
        assert relative_error(x, y) < EXACT, name


@pytest.mark.parametrize("missing", ["A_log", "dt_bias"])
def test_recurrence_with_an_absent_gate_parameter(missing):
    window = make_window(1, 4, seed=3)
    options = window.options | {missing: None, "scale": 0.3}
    S0 = normal_state()
    row = [x[0] for x in window.inputs]
    for mine, theirs in zip(recurrence(*row, S0, **options), explicit_products(*row, S0, **options), strict=True):
        assert relative_error(mine, theirs) < EXACT


def test_recurrence_by_hand():
    """Two tokens, one head, K = 2, V = 1, every number worked out with the formulas of docs/design.md, section 2."""
    k = torch.tensor([[[1.0, 0.0]], [[0.6, 0.8]]])
    q = torch.tensor([[[1.0, 1.0]], [[2.0, -1.0]]])
    v = torch.tensor([[[2.0]], [[-1.0]]])
    g = torch.tensor([[[math.log(0.5), 0.0]], [[0.0, math.log(0.25)]]], dtype=torch.float64)
    beta = torch.tensor([[0.5], [1.0]])
    S0 = torch.tensor([[[4.0, 8.0]]])
    o, u, states = recurrence(q, k, v, g, beta, S0, scale=1.0)
    # Token 1: decayed (2, 8), read 2, u = 0.5 * (2 - 2) = 0.  Token 2: decayed (2, 2), read 2.8, u = -3.8.
    expected = [[[[4.0, 8.0]]], [[[2.0, 8.0]]], [[[2.0 - 3.8 * 0.6, 2.0 - 3.8 * 0.8]]]]
    assert relative_error(states, torch.tensor(expected, dtype=torch.float64)) < 1e-7  # k is float32: 0.6, 0.8 rounded
    assert relative_error(u.flatten(), torch.tensor([0.0, -3.8], dtype=torch.float64)) < 1e-7
    final = 2 * (2.0 - 3.8 * 0.6) - (2.0 - 3.8 * 0.8)
    assert relative_error(o.flatten(), torch.tensor([10.0, final], dtype=torch.float64)) < 1e-7


def test_full_step_without_decay_stores_the_value_exactly():
    """beta = 1, |k| = 1: the delta rule makes the state answer v to k, whatever it held."""
    window = make_window(1, 5, gate="precomputed", l2norm=False, beta="plain", seed=5)
    _, k, v, g, beta = (x[0].double() for x in window.inputs)
    k = F.normalize(k, dim=-1)
    o, _, states = recurrence(k, k, v, torch.zeros_like(g), torch.ones_like(beta), normal_state(), scale=1.0)
    assert relative_error(o, v) < EXACT
    assert relative_error(torch.einsum("thvk,thk->thv", states[1:], k), v) < EXACT


def test_double_step_is_a_reflection():
    """beta = 2, v = 0, |k| = 1: applied twice, the reflection gives the state back."""
    k = F.normalize(torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(6)).double(), dim=-1).expand(2, 2, 8)
    S0 = normal_state().double()
    zeros = torch.zeros(2, 2, 6).double()
    _, _, states = recurrence(k, k, zeros, torch.zeros(2, 2).double(), torch.full((2, 2), 2.0).double(), S0)
    assert relative_error(states[2], S0) < EXACT
    assert relative_error(states[1], S0) > 0.1


@pytest.mark.parametrize("x", [-1000.0, -1.0, 19.99, 20.0, 20.01, 50.0])
def test_gates_at_their_extremes(x):
    """softplus turns linear above 20; the bounded gate stays within (lower_bound, 0)."""
    inputs = [torch.zeros(1, 1, 1)] * 3 + [torch.full((1, 1, 1), x), torch.zeros(1, 1)]
    S0 = torch.ones(1, 1, 1)
    for A_log in (-2.0, 0.0, 1.5):
        gate = {"use_gate_in_kernel": True, "A_log": torch.tensor([A_log])}
        unbounded = recurrence(*inputs, S0, **gate)[2][1].item()
        x32, rate = torch.tensor(x).item(), math.exp(A_log)
        softplus = x32 if x32 > 20 else math.log1p(math.exp(x32))
        assert unbounded == pytest.approx(math.exp(-rate * softplus), rel=1e-12)
        bounded = recurrence(*inputs, S0, lower_bound=-5.0, **gate)[2][1].item()
        sigmoid = 1 / (1 + math.exp(-rate * x32)) if rate * x32 > -700 else 0.0
        assert bounded == pytest.approx(math.exp(-5.0 * sigmoid), rel=1e-12)

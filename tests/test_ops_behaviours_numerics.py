"""Behaviours 1 to 4: the committed state is right under every gate and decay, for long, whatever is rejected."""

import math

import pytest
import torch
from budget import EPS32, assert_within_budget
from pools import SETTINGS_OF_THE_ORACLE, guarded_pool, make_window, oracle, same_bits
from torch import Tensor

import recoverssm_ops as rs
from recoverssm_ops.reference import recurrence

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def sequential(windows, accepted, row: int, S: Tensor, dtype: torch.dtype, stored: torch.dtype | None = None):
    """Yield one request's state after every window, token by token, rounded to ``stored`` as a pool would."""
    S = S.cpu().to(dtype)
    for window, n in zip(windows, accepted, strict=True):
        settings = {name: x for name, x in window.options.items() if name in SETTINGS_OF_THE_ORACLE}
        settings = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in settings.items()}
        tokens = [x[row, : int(n[row])].cpu() for x in window.inputs]
        S = recurrence(*tokens, S, dtype=dtype, **settings)[2][-1]
        S = S if stored is None else S.to(stored).to(dtype)
        yield S


def check_decoding(windows, accepted, pool_dtype, device) -> None:
    """Verify and commit every window; after each, all rows are as near to the float64 recurrence as the float32 one."""
    batch, _, value_heads, value_dim = windows[0].v.shape
    pool = guarded_pool(batch + 1, value_heads, value_dim, windows[0].k.shape[-1], dtype=pool_dtype, device=device)
    slots = torch.arange(batch, 0, -1, device=device)
    S0 = [pool.state[s].clone() for s in slots]
    exact = [sequential(windows, accepted, b, S0[b], torch.float64) for b in range(batch)]
    plain = [sequential(windows, accepted, b, S0[b], torch.float32, pool_dtype) for b in range(batch)]
    for step, (window, n) in enumerate(zip(windows, accepted, strict=True)):
        _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
        rs.kda_commit(pool.state, record, n.to(device), slots)
        states = [torch.stack([next(rows) for rows in kind]) for kind in (exact, plain)]
        assert_within_budget(pool.state[slots].cpu(), *states, name=f"state after window {step}")
    pool.check_only_written(slots)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
def test_b01_committed_state_follows_the_gate_at_its_extremes(device, gate, scalar, pool_dtype):
    """Rates from e^-8 to e^4, biases from -25 to 25 (softplus turns linear at 20), over many windows."""
    heads, K = 4, 12
    generator = torch.Generator().manual_seed(0)
    A_log = torch.linspace(-8, 4, heads, device=device)
    biases = torch.linspace(-25, 25, heads if scalar else heads * K)
    dt_bias = biases[torch.randperm(len(biases), generator=generator)].to(device)
    windows, accepted = [], []
    for step in range(8):
        window = make_window(
            2, 4, heads=2, value_heads=heads, key_dim=K, gate=gate, scalar_gate=scalar, device=device, seed=step
        )
        window.options |= {"A_log": A_log, "dt_bias": dt_bias}
        windows.append(window)
        accepted.append(torch.randint(0, 5, (2,), generator=generator))
    check_decoding(windows, accepted, pool_dtype, device)


@pytest.mark.parametrize("x", [-20.0, 0.0, 4.0, 8.0, 10.0, 12.0, 19.9, 20.1, 89.0, 200.0])
def test_b01_softplus_is_exact_where_it_bends_and_finite_beyond(device, x):
    """Nothing but decay (the step size is next to 0), so that a softplus linear above 12 already shows in the state."""
    window = make_window(1, 6, heads=1, value_heads=1, gate="unbounded", device=device)
    window = window.with_inputs(g=torch.full_like(window.g, x), beta=torch.full_like(window.beta, -30.0))
    window.options |= {"A_log": torch.tensor([-1 - math.log(max(x, 1.0))], device=device), "dt_bias": None}
    check_decoding([window] * 3, [torch.tensor([n]) for n in (6, 3, 5)], torch.float32, device)


DECAYS = {
    "-5 per token": lambda t, c: torch.full_like(t, -5.0),
    "-200 per token": lambda t, c: torch.full_like(t, -200.0),
    "one token of -200": lambda t, c: torch.where(t == 1, -200.0, -0.01),
    "one token of -10000": lambda t, c: torch.where(t == 1, -1e4, -0.01),
    "channels at odds": lambda t, c: torch.where((t + c) % 5 == 3, -60.0, -0.01),
    "no decay": lambda t, c: torch.zeros_like(t),
    "sums past the float32 range": lambda t, c: torch.where(t % 4 == 1, -3e38, -0.01),
    "a reset by -inf": lambda t, c: torch.where(t == 1, -math.inf, -0.01),
}


@pytest.mark.parametrize("T", [4, 16])
@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("decay", DECAYS)
def test_b02_strong_decays_stay_finite_and_right(device, decay, scalar, T):
    """Decays that overflow as factors; strong ones before weak ones, where differences of running sums cancel."""
    K = 24
    window = make_window(3, T, key_dim=K, value_dim=16, gate="precomputed", scalar_gate=scalar, device=device)
    t, c = torch.arange(T).float().view(1, T, 1, 1), torch.arange(1 if scalar else K).float()
    g = DECAYS[decay](*torch.broadcast_tensors(t, c)).expand(3, T, 2, -1)
    window = window.with_inputs(g=(g[..., 0] if scalar else g).contiguous().to(device))
    check_window(window)


@pytest.mark.parametrize("scalar", [False, True], ids=["kda", "scalar"])
@pytest.mark.parametrize("shift", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
def test_b02_strong_gates_stay_finite_and_right(device, gate, shift, scalar):
    """The same through the gate: the whole bound for 16 tokens, and unbounded decays far beyond -100."""
    window = make_window(3, 16, key_dim=24, value_dim=16, gate=gate, scalar_gate=scalar, device=device)
    window = window.with_inputs(g=window.g * 10 + shift)
    window.options["A_log"] = torch.tensor([0.0, 3.0], device=device)
    check_window(window)


@pytest.mark.parametrize("T", [8, 16])
def test_b02_bounded_gate_strong_then_weak(device, T):
    """Half a window near the bound, then hardly any decay: the late tokens' couplings are differences of large sums."""
    window = make_window(3, T, key_dim=24, value_dim=16, device=device)
    window = window.with_inputs(
        g=torch.where(torch.arange(T) < T // 2, 6.0, -4.0).view(1, T, 1, 1).to(device) + window.g
    )
    window.options |= {"A_log": None, "dt_bias": None}
    check_window(window)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_b02_repeated_keys_do_not_cancel(device, beta):
    """All keys equal, no decay, full or double step: a power series for the inverse loses every digit here.

    A double step forgets nothing, and with one key the rounding of <k, k> enters all T substitution steps with the same
    sign, while the recurrence rounds T times at random: T epsilons are the window-parallel form's own error.
    """
    window = make_window(2, 16, key_dim=24, value_dim=16, gate="precomputed", beta="plain", device=device)
    window = window.with_inputs(
        k=window.k[:, :1].expand_as(window.k).contiguous(),
        g=torch.zeros_like(window.g),
        beta=torch.full_like(window.beta, beta),
    )
    check_window(window, slack=16 * EPS32 if beta == 2 else 0.0)


def check_window(window, slack: float = 0.0) -> None:
    batch, T = window.q.shape[:2]
    pool = guarded_pool(batch, *window.v.shape[2:], window.k.shape[-1], device=window.q.device)
    accepted = torch.tensor([T, T - 1, 1, 0][:batch], device=window.q.device)
    answer = oracle(window, pool.state)
    o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    recovered = rs.kda_recover(pool.state, record, accepted)
    rs.kda_commit(pool.state, record, accepted)
    assert_within_budget(o.flatten(0, 1).cpu(), *answer.outputs(), name="o", slack=slack)
    assert_within_budget(record.u.flatten(0, 1).cpu(), *answer.corrections(), name="u", slack=slack)
    assert_within_budget(recovered.cpu(), *answer.states(accepted), name="recovered state", slack=slack)
    assert_within_budget(pool.state.cpu(), *answer.states(accepted), name="committed state", slack=slack)
    pool.check_guards()


@pytest.mark.parametrize("pool_dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("gate", ["bounded", "unbounded"])
def test_b03_error_does_not_grow_over_64_windows(device, gate, pool_dtype):
    """Slow decay, so that an error once made stays: within budget after each of 64 windows of random acceptance."""
    generator = torch.Generator().manual_seed(3)
    windows, accepted = [], []
    for step in range(64):
        window = make_window(2, 4, heads=1, value_heads=2, key_dim=16, value_dim=8, gate=gate, device=device, seed=step)
        window.options |= {"A_log": torch.zeros(2, device=device), "dt_bias": torch.full((2, 16), -6.0, device=device)}
        windows.append(window)
        accepted.append(torch.randint(0, 5, (2,), generator=generator))
    check_decoding(windows, accepted, pool_dtype, device)


GARBAGE = {"finite": 1e4, "inf": math.inf, "nan": math.nan}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_b04_rejected_tokens_change_no_bit(device, n, garbage, packed):
    """Garbage in the rejected suffix, in verify's inputs or in the record: the committed state keeps every bit."""
    T, batch = 5, 3
    window = make_window(batch, T, value_heads=4, lengths=[T] * batch if packed else None, device=device)
    accepted = torch.full((batch,), n, device=device)

    def committed(window, spoil=lambda record: None):
        pool = guarded_pool(batch, 4, 6, 8, device=device)
        o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
        spoil(record)
        rs.kda_commit(pool.state, record, accepted)
        return o, record, pool

    def rejected(x):
        return x.view(batch, T, *x.shape[2:])[:, n:]

    o, record, pool = committed(window)
    spoiled = {name: getattr(window, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for x in spoiled.values():
        rejected(x).fill_(GARBAGE[garbage])
    o2, record2, pool2 = committed(window.with_inputs(**spoiled))
    assert same_bits(pool2.storage, pool.storage)
    for name, x, y in (("u", record.u, record2.u), ("o", o, o2)):
        if name == "u" or garbage == "finite":
            x, y = (z.view(batch, T, *z.shape[2:])[:, :n] for z in (x, y))
            assert same_bits(x, y), f"{name} of an accepted token depends on a rejected one"

    def spoil(record):
        record.k, record.g = record.k.clone(), record.g.clone()
        for x in (record.u, record.k, record.g):
            rejected(x).fill_(GARBAGE[garbage])

    assert same_bits(committed(window, spoil)[2].storage, pool.storage)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_b04_accepted_lengths_clamp_to_the_row(device, index_dtype):
    lengths = [4, 2, 0, 3, 1, 4]
    extreme = torch.iinfo(index_dtype)
    for given in ([9, 9, 9, 9, 9, 9], [extreme.max] * 6, [-1] * 6, [extreme.min] * 6, [5, -3, 1, 4, 2, 4]):
        for packed in (True, False):
            window = make_window(6, 4, lengths=lengths if packed else None, device=device)
            pool = guarded_pool(6, 2, 6, 8, device=device)
            answer = oracle(window, pool.state)
            _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
            n = torch.tensor(given, dtype=index_dtype, device=device)
            recovered = rs.kda_recover(pool.state, record, n)
            rs.kda_commit(pool.state, record, n)
            for state in (recovered, pool.state):
                assert_within_budget(state.cpu(), *answer.states(given), name=f"{given} of {window.lengths}")


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
def test_b04_nothing_accepted_is_bit_identical(device, pool_dtype):
    """Signed zeros, subnormals, infinities and NaN survive a commit of no token, in place and to another slot."""
    info = torch.finfo(pool_dtype)
    special = torch.tensor([-0.0, 0.0, info.smallest_normal / 2, info.max, math.inf, -math.inf, math.nan, 1.0])
    pool = guarded_pool(4, 2, 6, 8, dtype=pool_dtype, device=device)
    pool.state[:2] = special.to(pool_dtype).to(device)
    pool.remember()
    window = make_window(2, 4, device=device)
    _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    source = torch.tensor([0, 1], device=device)
    dest = torch.tensor([[0, 2], [3, 1]], device=device)
    rs.kda_commit(pool.state, record, None, plan=rs.CommitPlan(source, dest, torch.zeros_like(dest)))
    pool.check_only_written([2, 3])
    assert same_bits(pool.state[2], pool.state[0]) and same_bits(pool.state[3], pool.state[1])

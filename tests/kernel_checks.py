"""What the kernels must do beyond parity, each a function of (device, pool dtype), for the interpreter and the GPU."""

from collections.abc import Callable

import torch
from budget import assert_within_budget
from kernel_cases import Case, Inputs, bits, build, check_states, check_verify

from recoverssm_ops.triton import launch


def parity(case: Case, device: str, data: torch.dtype, pool: torch.dtype) -> None:
    """Verify, then commit and recover at every kind of acceptance: none, some, all, and beyond the row."""
    inputs = build(case, device, data, pool)
    u = check_verify(inputs)
    for shift in range(2):
        wanted = [(0, case.T, case.T // 2, case.T + 3, -2)[(row + shift) % 5] for row in range(case.rows)]
        fresh = build(case, device, data, pool)
        check_states(fresh, u, wanted)


def data_dtype(pool: torch.dtype) -> torch.dtype:
    return torch.float32 if pool == torch.float32 else pool


def window(device: str, pool: torch.dtype, **changed) -> Inputs:
    settings = {"name": "behaviour", "T": 6, "K": 40, "V": 24, "HV": 2, "batch": 3, "gate": "unbounded", **changed}
    return build(Case(**settings), device, data_dtype(pool), pool)


def several_columns(device: str, pool: torch.dtype) -> None:
    """Three columns, the source among the destinations; lengths beyond the row are clamped."""
    x = window(device, pool)
    _, u = x.verify()
    before = x.state.clone()
    a, b, c = x.slot_list
    free = [s for s in range(x.state.shape[0]) if s not in x.slot_list]
    source = x.slots
    dest = torch.tensor([[free[0], a, -1], [b, free[1], -1], [free[2], -1, c]], device=device)
    length = torch.tensor([[2, 5, 3], [9, 1, 6], [0, 6, 3]], device=device)
    x.commit(u, source, dest, length)
    for row in range(3):
        oracle, low = (
            build(x.case, device, data_dtype(pool), pool).oracle(row, d)[2] for d in (torch.float64, torch.float32)
        )
        for to, n in zip(dest[row].tolist(), length[row].tolist(), strict=True):
            if to < 0:
                continue
            n = min(n, x.case.T)
            if n == 0:
                assert torch.equal(bits(x.state[to]), bits(before[x.slot_list[row]]))
            else:
                assert_within_budget(x.state[to].cpu(), oracle[n], low[n], name=f"row {row} after {n}")


def check_columns(make: Callable[[], Inputs], u: torch.Tensor) -> None:
    """Of a plan of three columns each writes what a plan of it alone would write, wherever the source's own slot comes."""
    x = make()
    pad, before = x.case.pad_slot_id, bits(x.state).clone()
    free = [s for s in range(len(x.state)) if s not in x.slot_list and s > pad]
    plan = []
    for row, slot in enumerate(x.slot_list):
        to = [free.pop() if free else pad, slot, free.pop() if len(free) > 2 else pad]
        plan.append(to[row % 3 :] + to[: row % 3])
    dest = torch.tensor(plan, device=u.device)
    T = x.case.T
    length = torch.tensor([((0, T, T // 2, T + 3, 1)[(row + m) % 5]) for row in range(len(plan)) for m in range(3)])
    length = length.view(-1, 3).to(u.device)
    source = x.source()
    x.commit(u, source, dest, length)
    written = set()
    for m in range(3):
        alone = make()
        alone.commit(u, source, dest[:, m : m + 1], length[:, m : m + 1])
        for row, to in enumerate(dest[:, m].tolist()):
            if to > pad and x.slot_list[row] > pad:
                assert torch.equal(bits(x.state[to]), bits(alone.state[to])), f"row {row}, column {m}"
                written.add(to)
    assert len(written) > 1
    for slot in set(range(len(x.state))) - written:
        assert torch.equal(bits(x.state)[slot], before[slot]), f"slot {slot} is nobody's, yet it changed"


def columns_have_the_bits_of_their_own_commits(device: str, pool: torch.dtype) -> None:
    u = window(device, pool).verify()[1]
    check_columns(lambda: window(device, pool), u)


def in_place_equals_out_of_place(device: str, pool: torch.dtype) -> None:
    x, y = window(device, pool), window(device, pool)
    _, u = x.verify()
    length = torch.tensor([[4], [6], [1]], device=device)
    free = torch.tensor([s for s in range(x.state.shape[0]) if s not in x.slot_list], device=device)
    x.commit(u, x.slots, x.slots[:, None], length)
    y.commit(u, y.slots, free[:, None], length)
    assert torch.equal(bits(x.state[x.slots.long()]), bits(y.state[free]))


def nothing_accepted_keeps_bits(device: str, pool: torch.dtype) -> None:
    """Signed zeros, NaN payloads and infinities survive a commit of no token, in place and as a copy."""
    x = window(device, pool)
    _, u = x.verify()
    kind = torch.int32 if pool == torch.float32 else torch.int16
    slot = x.state[x.slot_list[0]]
    pattern = torch.randint(
        torch.iinfo(kind).min, torch.iinfo(kind).max, slot.shape, generator=torch.Generator().manual_seed(1)
    )
    slot.view(kind).copy_(pattern.to(kind))
    slot[0, 0, :3] = torch.tensor([-0.0, float("inf"), -0.0], dtype=pool)
    free = next(s for s in range(x.state.shape[0]) if s not in x.slot_list)
    before = bits(x.state).clone()
    dest = torch.tensor([[x.slot_list[0], free], [x.slot_list[1], -1], [-1, -1]], device=device)
    x.commit(u, x.slots, dest, torch.zeros_like(dest))
    before[free] = before[x.slot_list[0]]
    assert torch.equal(bits(x.state), before)


def rejected_tokens_change_no_bit(device: str, pool: torch.dtype) -> None:
    clean, dirty = window(device, pool), window(device, pool)
    _, u = clean.verify()
    n = [2, 0, 5]
    bad = {name: getattr(dirty, name).clone() for name in ("k", "g")} | {"u": u.clone()}
    for row, accepted in enumerate(n):
        for x in bad.values():
            x[row, accepted:] = float("nan")
    length = torch.tensor(n, device=device)
    clean.commit(u, clean.slots, clean.slots[:, None], length[:, None])
    dirty.commit(bad["u"], dirty.slots, dirty.slots[:, None], length[:, None], k=bad["k"], g=bad["g"])
    assert torch.equal(bits(clean.state), bits(dirty.state))
    initial = window(device, pool).state[clean.slots.long()]
    recovered = clean.recover(initial, u, length)
    assert torch.equal(bits(recovered), bits(dirty.recover(initial, bad["u"], length, k=bad["k"], g=bad["g"])))


def later_tokens_do_not_reach_earlier_ones(
    device: str, pool: torch.dtype, n: int = 3, gates: tuple[str, ...] = ("bounded", "unbounded"), **sizes: int
) -> None:
    """NaN and infinity from token n on, in any input: outputs before n keep their bits, token n's are not finite."""
    for gate in gates:
        x = window(device, pool, gate=gate, **sizes)
        expected = x.verify()
        for name in ("q", "k", "v", "g", "beta"):
            for garbage in (float("nan"), float("inf")):
                spoiled = getattr(x, name).clone()
                spoiled[:, n:] = garbage
                actual = x.verify(**{name: spoiled})
                for a, b in zip(actual, expected, strict=True):
                    assert torch.equal(bits(a[:, :n]), bits(b[:, :n])), (gate, name, garbage)
                if garbage != garbage:
                    assert actual[0][:, n].isnan().all(), (gate, name)


def five_launches_same_bits(device: str, pool: torch.dtype) -> None:
    copies = [window(device, pool, gate="bounded") for _ in range(5)]
    (o, u), *others = [x.verify() for x in copies]
    assert all(torch.equal(bits(a), bits(o)) and torch.equal(bits(b), bits(u)) for a, b in others)
    length = torch.tensor([[4], [6], [1]], device=device)
    for x in copies:
        x.commit(u, x.slots, x.slots[:, None], length)
        assert torch.equal(bits(x.state), bits(copies[0].state))


def input_strides(device: str, pool: torch.dtype) -> None:
    """Views into a fused projection and transposed activations give the bits that contiguous tensors give."""
    x = window(device, pool)
    expected = x.verify()
    views = {}
    for name in ("q", "k", "v", "g", "beta"):
        value = getattr(x, name)
        fused = torch.full((*value.shape[:-1], 2 * value.shape[-1] + 3), float("nan"), dtype=value.dtype, device=device)
        fused[..., 2 : 2 + value.shape[-1]] = value
        views[name] = fused[..., 2 : 2 + value.shape[-1]]
    heads_first = {name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in views}
    last_axis = {name: getattr(x, name).transpose(1, -1).contiguous().transpose(1, -1) for name in views}
    length = torch.tensor([4, 6, 1], device=device)
    initial = x.state[x.slots.long()]
    recovered = x.recover(initial, expected[1], length)
    for form in (views, heads_first, last_axis):
        actual = x.verify(**form)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(bits(x.recover(initial, expected[1], length, k=form["k"], g=form["g"])), bits(recovered))


def plan_strides(device: str, pool: torch.dtype) -> None:
    """Slots and lengths may be columns of wider tables, of either integer width."""
    x, y = window(device, pool), window(device, pool)
    _, u = x.verify()
    length = torch.tensor([4, 6, 1], device=device)
    table = torch.stack([y.slots.long(), torch.full_like(y.slots.long(), 99)], 1)
    x.commit(u, x.slots, x.slots[:, None], length[:, None])
    y.commit(u, table[:, 0], table[:, :1], length.expand(2, 3).t()[:, :1].int())
    assert torch.equal(bits(x.state), bits(y.state))
    again = window(device, pool)
    again.slots = table[:, 0]
    assert torch.equal(bits(again.verify()[1]), bits(u))


def missing_parameters(device: str, pool: torch.dtype) -> None:
    """The bounded gate without a rate, gates without a bias."""
    for gate, scalar, absent in (("bounded", False, ("A_log", "dt_bias")), ("unbounded", True, ("dt_bias",))):
        x = window(device, pool, gate=gate, scalar_gate=scalar)
        for name in absent:
            setattr(x, name, None)
        check_states(x, check_verify(x), [6, 3, 1])


def empty(device: str, pool: torch.dtype) -> None:
    """No rows: zeros for tokens that nobody owns, and no launch."""
    x = window(device, pool)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    q, k, v, g, beta = (t[:1] for t in (x.q, x.k, x.v, x.g, x.beta))
    settings = (x.A_log, x.dt_bias, x.lower_bound)
    o, u = launch.verify(q, k, v, g, beta, x.state, nobody[:0], nobody, 6, *settings, 1.0, True, True, True, False, -1)
    assert o.shape == u.shape == v.shape and o.count_nonzero() == 0 and u.count_nonzero() == 0
    before = bits(x.state).clone()
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    launch.commit(x.state, u, k, g, none[:, 0], none, none, nobody, 6, *settings, True, True, -1)
    assert torch.equal(bits(x.state), before)
    assert launch.recover(x.state[:0], u, k, g, none[:, 0], nobody, 6, *settings, True, True).shape[0] == 0


CHECKS = [
    several_columns,
    columns_have_the_bits_of_their_own_commits,
    in_place_equals_out_of_place,
    nothing_accepted_keeps_bits,
    rejected_tokens_change_no_bit,
    later_tokens_do_not_reach_earlier_ones,
    five_launches_same_bits,
    input_strides,
    plan_strides,
    missing_parameters,
    empty,
]

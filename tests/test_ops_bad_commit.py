"""Wrong calls of commit and recover, and the checks that look at values (RECOVERSSM_DEBUG=1)."""

from dataclasses import replace

import pytest
import torch
from pools import guarded_pool, make_window

import recoverssm_ops as rs

B, HV, K, V, SLOTS = 3, 2, 8, 6, 6


@pytest.fixture(autouse=True)
def with_grad_mode_and_without_debugging(monkeypatch):
    monkeypatch.delenv("RECOVERSSM_DEBUG", raising=False)
    with torch.enable_grad():
        yield


def verified(device, lengths=None):
    window = make_window(B, 4, lengths=lengths, device=device)
    pool = guarded_pool(SLOTS, HV, V, K, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
    return pool, {"state": pool.state, "record": record, "num_accepted": torch.tensor([1, 4, 2], device=device)}


def index(*rows, dtype=torch.int64):
    return lambda a: torch.tensor(rows, dtype=dtype, device=a["state"].device)


def planned(**change):
    """A plan with one field wrong."""

    def make(a):
        device = a["state"].device
        columns = torch.tensor([[4, 1], [0, -1], [2, 3]], device=device)
        plan = rs.CommitPlan(columns[:, 0], columns, torch.tensor([[1, 2], [4, 0], [2, 2]], device=device))
        return replace(plan, **{name: x(a) if callable(x) else x for name, x in change.items()})

    return {"plan": make, "num_accepted": None}


BOTH = {
    "record a tuple": ({"record": (1, 2)}, TypeError, "record should be a Record made by kda_verify, but was tuple"),
    "record a tensor": ({"record": lambda a: a["record"].u}, TypeError, "record should be a Record .* but was Tensor"),
    "record.u bf16": (
        {"record": lambda a: replace(a["record"], u=a["record"].u.bfloat16())},
        TypeError,
        "record.u should have dtype float32, but was bfloat16",
    ),
    "record elsewhere": (
        {"record": lambda a: replace(a["record"], u=a["record"].u.to("meta"))},
        ValueError,
        "record.u should be on .* like the state, but was on meta",
    ),
    "num_accepted float": (index(1.0, 4, 2, dtype=torch.float32), TypeError, "num_accepted should have .* was float32"),
    "num_accepted int8": (index(1, 4, 2, dtype=torch.int8), TypeError, "num_accepted should have dtype .* was int8"),
    "num_accepted a list": ({"num_accepted": [1, 4, 2]}, TypeError, "num_accepted should be a tensor, but was list"),
    "num_accepted too short": (index(1, 4), ValueError, r"num_accepted should have shape \[B\] = \[3\], but was \[2\]"),
    "num_accepted 2-d": (index([1], [4], [2]), ValueError, r"num_accepted should have shape .* but was \[3, 1\]"),
    "num_accepted elsewhere": (
        {"num_accepted": lambda a: a["num_accepted"].to("meta")},
        ValueError,
        "num_accepted should be on .* like the state, but was on meta",
    ),
    "state float64": ({"state": lambda a: a["state"].double()}, TypeError, "state should have dtype .* was float64"),
    "state K-first": (
        {"state": lambda a: a["state"].mT.contiguous()},
        ValueError,
        r"state should .* 8, 6\]",
    ),
    "state 3-d": ({"state": lambda a: a["state"][0]}, ValueError, r"state should have shape .* was \[2, 6, 8\]"),
    "state K strided": (
        {"state": lambda a: a["state"].mT.contiguous().mT},
        ValueError,
        r"state should have K contiguous \(last stride 1\), but its strides were \[96, 48, 1, 6\]",
    ),
    "state requires grad": (
        {"state": lambda a: a["state"].clone().requires_grad_()},
        RuntimeError,
        "state requires grad, but RecoverSSM is for inference only",
    ),
}
COMMIT = {
    "num_accepted missing": (
        {"num_accepted": None},
        ValueError,
        "num_accepted should be .* unless a plan",
    ),
    "slots float": (
        {"state_indices": index(4.0, 0, 2, dtype=torch.float32)},
        TypeError,
        "state_indices .* float32",
    ),
    "slots too many": ({"state_indices": index(4, 0, 2, 1)}, ValueError, r"state_indices .* \[3\], but was \[4\]"),
    "slots elsewhere": (
        {"state_indices": lambda a: a["num_accepted"].to("meta")},
        ValueError,
        "state_indices .* meta",
    ),
    "too few slots": (
        {"state": lambda a: a["state"][:2]},
        ValueError,
        "state have at least 3 slots.* had 2",
    ),
    "pad_slot_id a float": ({"pad_slot_id": -1.0}, TypeError, "pad_slot_id should be an int, but was float"),
    "plan a tuple": (
        {"plan": (1, 2, 3), "num_accepted": None},
        TypeError,
        "plan should be a CommitPlan.*tuple",
    ),
    "plan and num_accepted": (
        planned() | {"num_accepted": index(1, 4, 2)},
        ValueError,
        "num_accepted should be None",
    ),
    "plan and slots": (
        planned() | {"state_indices": index(4, 0, 2)},
        ValueError,
        "state_indices should be None",
    ),
    "plan source 2-d": (planned(source=index([4], [0], [2])), ValueError, r"plan.source .* \[3\], but was \[3, 1\]"),
    "plan source float": (planned(source=index(4, 0, 2, dtype=torch.float32)), TypeError, "plan.source .* float32"),
    "plan source a list": (planned(source=[4, 0, 2]), TypeError, "plan.source should be a tensor, but was list"),
    "plan dest 1-d": (
        planned(dest=index(4, 0, 2)),
        ValueError,
        r"plan.dest should .*\[B, M\].* but was \[3\]",
    ),
    "plan dest 0-d": (planned(dest=index()), ValueError, r"plan.dest should have shape \[B, M\].* but was \[0\]"),
    "plan dest a number": (
        planned(dest=lambda a: torch.tensor(1, device=a["state"].device)),
        ValueError,
        r"plan.dest should .* but was \[\]",
    ),
    "plan dest a list": (planned(dest=[[4], [0], [2]]), TypeError, "plan.dest should be a tensor, but was list"),
    "plan dest of another batch": (
        planned(dest=index([4, 1])),
        ValueError,
        r"plan.dest should .* but was \[1, 2\]",
    ),
    "plan dest float": (
        planned(dest=index([4.0], [0], [2], dtype=torch.float32)),
        TypeError,
        "plan.dest .* float32",
    ),
    "plan lengths 1-d": (planned(length=index(1, 2, 3)), ValueError, r"plan.length .*\[3, 2\], but was \[3\]"),
    "plan lengths fewer": (
        planned(length=index([1], [2], [3])),
        ValueError,
        r"plan.length .*\[3, 2\], .* \[3, 1\]",
    ),
    "plan lengths bool": (planned(length=index([1], [2], [3], dtype=torch.bool)), TypeError, "plan.length .* was bool"),
    "plan lengths elsewhere": (
        planned(length=lambda a: torch.zeros(3, 2, dtype=torch.int64, device="meta")),
        ValueError,
        "plan.length should be on .* but was on meta",
    ),
}


def change(arguments, changes):
    changes = changes if isinstance(changes, dict) else {"num_accepted": changes}
    return arguments | {name: x(arguments) if callable(x) else x for name, x in changes.items()}


@pytest.mark.parametrize("case", [*BOTH, *COMMIT])
def test_commit(device, case):
    changes, exception, message = (BOTH | COMMIT)[case]
    pool, arguments = verified(device)
    with pytest.raises(exception, match=message):
        rs.kda_commit(**change(arguments, changes))
    pool.check_unchanged()
    rs.kda_commit(**arguments)  # the record was not consumed by the refused call
    with pytest.raises(AssertionError):
        pool.check_unchanged()


@pytest.mark.parametrize("case", BOTH)
def test_recover(device, case):
    changes, exception, message = BOTH[case]
    pool, arguments = verified(device)
    arguments["state"] = arguments["state"][:B]
    changed = change(arguments, changes)
    changed["initial_state"] = changed.pop("state")
    with pytest.raises(exception, match=message):
        rs.kda_recover(**changed)
    pool.check_unchanged()


def test_recover_wants_one_checkpoint_a_row(device):
    pool, arguments = verified(device)
    with pytest.raises(ValueError, match=r"initial_state should have shape .*\[3, 2, 6, 8\], but was \[6, 2, 6, 8\]"):
        rs.kda_recover(pool.state, arguments["record"], arguments["num_accepted"])


def test_another_packed_layout(device):
    """commit and recover take the layout from the record; another tensor may be refused, the same one is accepted."""
    pool, arguments = verified(device, lengths=[4, 1, 3])
    other = arguments["record"].cu_seqlens.clone()
    with pytest.raises(ValueError, match="cu_seqlens should be the tensor that kda_verify received, but was another"):
        rs.kda_commit(**arguments, cu_seqlens=other)
    with pytest.raises(ValueError, match="cu_seqlens should be the tensor that kda_verify received"):
        rs.kda_recover(pool.state[:3], arguments["record"], arguments["num_accepted"], cu_seqlens=other)
    pool.check_unchanged()
    rs.kda_commit(**arguments, cu_seqlens=arguments["record"].cu_seqlens)


def test_debug_slots_exist(device, monkeypatch):
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    slots = torch.tensor([4, 6, 2], device=device)
    columns = torch.tensor([[4], [0], [2]], device=device)
    window = make_window(B, 4, device=device)
    pool, arguments = verified(device)
    message = r"should name slots in \[0, 6\), but was"
    with pytest.raises(ValueError, match=f"state_indices {message}"):
        rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
    with pytest.raises(ValueError, match=f"state_indices {message}"):
        rs.kda_commit(**arguments, state_indices=slots)
    arguments["num_accepted"] = None
    with pytest.raises(ValueError, match=f"plan.source {message}"):
        rs.kda_commit(**arguments, plan=rs.CommitPlan(slots, columns, columns))
    with pytest.raises(ValueError, match=f"plan.dest {message}"):
        rs.kda_commit(**arguments, plan=rs.CommitPlan(columns[:, 0], slots[:, None], columns))
    pool.check_unchanged()


def test_debug_slots_are_written_once_and_may_be_read_twice(device, monkeypatch):
    """Rows that continue from one shared state read its slot; none may write it."""
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    shared = torch.tensor([4, 2, 2], device=device)
    apart = torch.tensor([[4], [0], [1]], device=device)
    window = make_window(B, 4, device=device)
    pool, arguments = verified(device)
    rs.kda_verify(*window.inputs, pool.state, shared, **window.options)
    with pytest.raises(ValueError, match=r"state_indices should name distinct slots, but was \[4, 2, 2\]"):
        rs.kda_commit(**arguments, state_indices=shared)
    arguments["num_accepted"] = None
    with pytest.raises(ValueError, match=r"plan\.dest should name distinct slots"):
        rs.kda_commit(**arguments, plan=rs.CommitPlan(apart[:, 0], shared[:, None], apart))
    with pytest.raises(ValueError, match=r"plan\.dest should not name another row's plan.source"):
        rs.kda_commit(**arguments, plan=rs.CommitPlan(shared, torch.tensor([[4], [0], [2]], device=device), apart))
    pool.check_unchanged()
    rs.kda_commit(**arguments, plan=rs.CommitPlan(shared, apart, apart))


def test_debug_accepts_padding_more_than_once(device, monkeypatch):
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    window = make_window(B, 4, device=device)
    pool, _ = verified(device)
    for pad_slot_id, values in ((-1, [-1, 3, -1]), (0, [0, 3, 0]), (0, [-1, 3, 0])):
        slots = torch.tensor(values, device=device)
        _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options, pad_slot_id=pad_slot_id)
        rs.kda_commit(pool.state, record, torch.ones_like(slots), slots, pad_slot_id=pad_slot_id)
        pool.check_only_written([3])


PACKINGS = {
    "a row longer than max_seqlen": [0, 5, 6, 8],
    "descending": [0, 4, 3, 7],
    "beyond the tokens": [0, 4, 7, 9],
    "before the tokens": [-1, 3, 4, 8],
}


@pytest.mark.parametrize("case", PACKINGS)
def test_debug_packing(device, monkeypatch, case):
    window = make_window(B, 4, lengths=[4, 1, 3], device=device)
    pool, _ = verified(device)
    window.options["cu_seqlens"] = torch.tensor(PACKINGS[case], device=device)
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens should ascend from 0 or more .* = 4 .* 8 tokens, but was \["):
        rs.kda_verify(*window.inputs, pool.state, **window.options)
    pool.check_unchanged()


def test_debug_accepts_right_packing(device, monkeypatch):
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    window = make_window(B, 4, lengths=[4, 0, 3], tail=2, device=device)
    pool, _ = verified(device)
    o, _ = rs.kda_verify(*window.inputs, pool.state, **window.options)
    assert o.shape == (1, 9, HV, V)

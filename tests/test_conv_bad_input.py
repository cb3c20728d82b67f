"""Wrong calls of the convolution: the exception names the argument, what it should be and what it was; nothing is written."""

import pytest
import torch
from conv_cases import guarded_conv_pool, make_conv_window

import recoverssm_ops as rs

B, T, D, SLOTS = 3, 4, 12, 5


@pytest.fixture(autouse=True)
def with_grad_mode_and_without_debugging(monkeypatch):
    monkeypatch.delenv("RECOVERSSM_DEBUG", raising=False)
    with torch.enable_grad():
        yield


def verify_arguments(device, packed=False):
    window = make_conv_window(B, T, lengths=[4, 1, 3] if packed else None, device=device)
    pool = guarded_conv_pool(SLOTS, D, device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    inputs = dict(zip(("x", "weight", "bias"), window.inputs, strict=True))
    return inputs | {"conv_state": pool.state, "conv_state_indices": slots, **window.options}, pool


def commit_arguments(device, packed=False):
    arguments, pool = verify_arguments(device, packed)
    arguments = {
        name: arguments[name] for name in arguments if name in ("x", "conv_state", "conv_state_indices", "cu_seqlens")
    }
    return arguments | {"num_accepted": torch.tensor([1, 4, 2], device=device)}, pool


def new(name, *shape, **kind):
    return {name: lambda a: torch.zeros(shape, device=a["x"].device, **kind)}


def to(name, where):
    return {name: lambda a: a[name].to(where)}


def grad(name):
    return {name: lambda a: a[name].detach().clone().requires_grad_()}


INT = {"dtype": torch.int64}
BOTH = {
    "x a list": ({"x": [1.0]}, TypeError, "x should be a tensor, but was list"),
    "x float64": (to("x", torch.float64), TypeError, "x should have dtype float32, bfloat16, float16, but was float64"),
    "x elsewhere": (to("x", "meta"), ValueError, "x should be on .* like the state, but was on meta"),
    "x 2-d": (new("x", T, D), ValueError, r"x should have shape \[B, T, D\] = \[any, any, 12\], but was \[4, 12\]"),
    "x channels first": ({"x": lambda a: a["x"].mT}, ValueError, r"x should have shape .* but was \[3, 12, 4\]"),
    "x requires grad": (grad("x"), RuntimeError, "x requires grad, but RecoverSSM is for inference only"),
    "x empty window": (
        {"x": lambda a: a["x"][:, :0]},
        ValueError,
        "the window T of x should be between 1 and 16 tokens, but was 0",
    ),
    "conv_state None": ({"conv_state": None}, TypeError, "conv_state should be a tensor, but was NoneType"),
    "conv_state integer": (to("conv_state", torch.int32), TypeError, "conv_state should have dtype .* was int32"),
    "conv_state 2-d": (new("conv_state", 5, 12), ValueError, r"conv_state should .*\[slots, D, W-1\].* was \[5, 12\]"),
    "conv_state column first": (
        {"conv_state": lambda a: a["conv_state"].mT},
        ValueError,
        r"conv_state should .* width W between 2 and 8, but was \[5, 3, 12\]",
    ),
    "conv_state without columns": (new("conv_state", 5, 12, 0), ValueError, r"width W between 2 and 8, but was \[5, 12, 0\]"),
    "conv_state too wide": (new("conv_state", 5, 12, 8), ValueError, r"width W between 2 and 8, but was \[5, 12, 8\]"),
    "conv_state of no channel": (new("conv_state", 5, 0, 3), ValueError, r"at least one channel D, .* was \[5, 0, 3\]"),
    "conv_state requires grad": (grad("conv_state"), RuntimeError, "conv_state requires grad"),
    "slots int16": (to("conv_state_indices", torch.int16), TypeError, "conv_state_indices should have dtype .* int16"),
    "slots a list": ({"conv_state_indices": [4, 0, 2]}, TypeError, "conv_state_indices should be a tensor, but was list"),
    "slots of another batch": (new("conv_state_indices", 2, **INT), ValueError, r"conv_state_indices .*\[3\], but was \[2\]"),
    "slots elsewhere": (to("conv_state_indices", "meta"), ValueError, "conv_state_indices should be on .* on meta"),
    "too few slots": (
        {"conv_state": lambda a: a["conv_state"][:2], "conv_state_indices": None},
        ValueError,
        "conv_state_indices should be given, or conv_state have at least 3 slots, one a row, but it had 2",
    ),
    "pad_slot_id a float": ({"pad_slot_id": -1.0}, TypeError, "pad_slot_id should be an int, but was float"),
    "packed without a row axis": (
        {"cu_seqlens": lambda a: torch.tensor([0, 4, 8], device=a["x"].device), "max_seqlen": 4},
        ValueError,
        r"x should have shape \[1, N, ...\] with cu_seqlens, but was \[3, 4, 12\]",
    ),
    "cu_seqlens float": (
        {"cu_seqlens": lambda a: torch.zeros(4, device=a["x"].device), "max_seqlen": 4},
        TypeError,
        "cu_seqlens should have dtype int32, int64, but was float32",
    ),
}  # fmt: skip
VERIFY = {
    "weight float64": (to("weight", torch.float64), TypeError, "weight should have dtype .* was float64"),
    "weight elsewhere": (to("weight", "meta"), ValueError, "weight should be on .* but was on meta"),
    "weight transposed": (
        {"weight": lambda a: a["weight"].t()},
        ValueError,
        r"weight should have shape \[D, W\] = \[12, 4\], but was \[4, 12\]",
    ),
    "weight of another width": (new("weight", D, 3), ValueError, r"weight should have shape .* but was \[12, 3\]"),
    "weight with an axis of groups": (new("weight", D, 1, 4), ValueError, r"weight should have .* was \[12, 1, 4\]"),
    "weight a parameter": (grad("weight"), RuntimeError, "weight requires grad, but RecoverSSM is for inference only"),
    "bias 2-d": (new("bias", D, 1), ValueError, r"bias should have shape \[D\] = \[12\], but was \[12, 1\]"),
    "bias a number": ({"bias": 1.0}, TypeError, "bias should be a tensor, but was float"),
    "activation unknown": ({"activation": "gelu"}, ValueError, "activation should be 'silu' or None, but was 'gelu'"),
    "activation a bool": ({"activation": True}, ValueError, "activation should be 'silu' or None, but was True"),
    "max_seqlen unlike the window": ({"max_seqlen": 8}, ValueError, "max_seqlen should be 4, the window of x, .* was 8"),
}  # fmt: skip


def index(*rows):
    return lambda a: torch.tensor(rows, device=a["x"].device)


def planned(**change):
    def make(a):
        columns = torch.tensor([[4, 1], [0, -1], [2, 3]], device=a["x"].device)
        fields = {"source": columns[:, 0], "dest": columns, "length": columns.clamp(min=0)}
        return rs.CommitPlan(**fields | {name: x(a) if callable(x) else x for name, x in change.items()})

    return {"plan": make, "num_accepted": None, "conv_state_indices": None}


COMMIT = {
    "num_accepted missing": ({"num_accepted": None}, ValueError, "num_accepted should be a tensor .* unless a plan"),
    "num_accepted float": (to("num_accepted", torch.float32), TypeError, "num_accepted should have dtype .* float32"),
    "num_accepted too short": ({"num_accepted": index(1, 4)}, ValueError, r"num_accepted .* \[3\], but was \[2\]"),
    "plan a tuple": (planned() | {"plan": (1, 2, 3)}, TypeError, "plan should be a CommitPlan, but was tuple"),
    "plan and num_accepted": (
        planned() | {"num_accepted": index(1, 4, 2)},
        ValueError,
        "num_accepted should be None when a plan is given",
    ),
    "plan and slots": (
        planned() | {"conv_state_indices": index(4, 0, 2)},
        ValueError,
        "conv_state_indices should be None when a plan is given",
    ),
    "plan source None": (planned(source=None), TypeError, "plan.source should be a tensor, but was NoneType"),
    "plan source 2-d": (planned(source=index([4], [0], [2])), ValueError, r"plan.source .* \[3\], but was \[3, 1\]"),
    "plan dest 1-d": (planned(dest=index(4, 0, 2)), ValueError, r"plan.dest should .*\[B, M\].* but was \[3\]"),
    "plan dest a list": (planned(dest=[[4], [0], [2]]), TypeError, "plan.dest should be a tensor, but was list"),
    "plan length of other columns": (
        planned(length=index([1], [2], [3])),
        ValueError,
        r"plan.length should have shape \[B, M\] like plan.dest = \[3, 2\], but was \[3, 1\]",
    ),
    "plan length float": (
        planned(length=lambda a: torch.zeros(3, 2, device=a["x"].device)),
        TypeError,
        "plan.length should have dtype int32, int64, but was float32",
    ),
}  # fmt: skip


def refuse(function, arguments, pool, change, error, message):
    right = dict(arguments)
    arguments = arguments | {name: x(arguments) if callable(x) else x for name, x in change.items()}
    with pytest.raises(error, match=message):
        function(**arguments)
    pool.check_unchanged()
    function(**right)


@pytest.mark.parametrize("case", BOTH | VERIFY)
def test_verify_refuses(device, case):
    refuse(rs.causal_conv1d_verify, *verify_arguments(device), *(BOTH | VERIFY)[case])


@pytest.mark.parametrize("case", BOTH | COMMIT)
def test_commit_refuses(device, case):
    change, *rest = (BOTH | COMMIT)[case]
    change = {name: x for name, x in change.items() if name != "max_seqlen"}
    refuse(rs.causal_conv1d_commit, *commit_arguments(device), change, *rest)


@pytest.mark.parametrize("max_seqlen, error", [(None, ValueError), (4.0, TypeError), (0, ValueError), (17, ValueError)])
def test_packed_needs_a_window(device, max_seqlen, error):
    arguments, pool = verify_arguments(device, packed=True)
    refuse(
        rs.causal_conv1d_verify, arguments, pool, {"max_seqlen": max_seqlen}, error, "max_seqlen should be .* but was"
    )


@pytest.mark.parametrize("tokens", [17, 64])
def test_b14_a_query_longer_than_the_window_is_refused(device, tokens):
    """As a serving engine's dummy run before capture would send it, dense and packed, to verify and to commit."""
    for packed in (False, True):
        for function, make in (
            (rs.causal_conv1d_verify, verify_arguments),
            (rs.causal_conv1d_commit, commit_arguments),
        ):
            arguments, pool = make(device, packed)
            longer = new("x", *((1, 3 * tokens, D) if packed else (B, tokens, D)))
            refuse(function, arguments, pool, longer, ValueError, f"x .*but (was|held) ({tokens}|{3 * tokens})")


def test_debug_looks_at_values(device, monkeypatch):
    monkeypatch.setenv("RECOVERSSM_DEBUG", "1")
    twice = {"conv_state_indices": torch.tensor([4, 2, 2], device=device)}
    beyond = {"conv_state_indices": torch.tensor([5, 0, 2], device=device)}
    refuse(rs.causal_conv1d_commit, *commit_arguments(device), twice, ValueError, "should name distinct slots")
    for function, make in ((rs.causal_conv1d_verify, verify_arguments), (rs.causal_conv1d_commit, commit_arguments)):
        refuse(function, *make(device), beyond, ValueError, r"conv_state_indices should name slots in \[0, 5\)")
        descending = {"cu_seqlens": torch.tensor([0, 4, 3, 8], device=device)}
        refuse(function, *make(device, packed=True), descending, ValueError, "cu_seqlens should ascend")
    same = planned(dest=index([4, 1], [0, 1], [2, 3]))
    refuse(rs.causal_conv1d_commit, *commit_arguments(device), same, ValueError, "plan.dest should name distinct slots")


def test_grad_is_refused_only_where_it_is_recorded(device):
    arguments, _ = verify_arguments(device)
    for name in ("weight", "bias", "x"):
        arguments[name].requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = rs.causal_conv1d_verify(**arguments)
            rs.causal_conv1d_commit(arguments["conv_state"], arguments["x"], torch.ones(B, **INT, device=device))
        assert not y.requires_grad

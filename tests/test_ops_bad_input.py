"""Wrong calls: the exception names the argument, what it should be and what it was, and nothing has been written."""

import re

import pytest
import torch
from pools import guarded_pool, make_window

import recoverssm_ops as rs

B, T, H, HV, K, V, SLOTS = 3, 4, 2, 4, 8, 6, 5


@pytest.fixture(autouse=True)
def with_grad_mode_and_without_debugging(monkeypatch):
    monkeypatch.delenv("RECOVERSSM_DEBUG", raising=False)
    with torch.enable_grad():
        yield


def verify_arguments(device, packed=False, scalar_gate=False, gate="bounded"):
    """A right call, as keyword arguments; ``pool`` comes back with them."""
    lengths = [4, 1, 3] if packed else None
    window = make_window(B, T, value_heads=HV, lengths=lengths, scalar_gate=scalar_gate, gate=gate, device=device)
    pool = guarded_pool(SLOTS, HV, V, K, device=device)
    arguments = dict(zip(["q", "k", "v", "g", "beta"], window.inputs, strict=True))
    arguments |= {"state": pool.state, "state_indices": torch.tensor([4, 0, 2], device=device), **window.options}
    return arguments, pool


def grad(name):
    return {name: lambda a: a[name].detach().clone().requires_grad_()}


def to(name, where):
    return {name: lambda a: a[name].to(where)}


def new(name, *shape, **kind):
    return {name: lambda a: torch.zeros(shape, device=a["q"].device, **kind)}


GATE = ("A_log", "dt_bias", "lower_bound")
INT, ERROR_DEVICE = {"dtype": torch.int64}, "should be on .* but was on meta"
VERIFY = {
    # not a tensor, dtype
    "q a list": ({"q": [1.0]}, TypeError, "q should be a tensor, but was list"),
    "state None": ({"state": None}, TypeError, "state should be a tensor, but was NoneType"),
    "g float64": (to("g", torch.float64), TypeError, "g should have dtype float32, bfloat16, float16, but was float64"),
    "k integer": (to("k", torch.int32), TypeError, "k should have dtype .*, but was int32"),
    "v bool": (to("v", torch.bool), TypeError, "v should have dtype .*, but was bool"),
    "beta float64": (to("beta", torch.float64), TypeError, "beta should have dtype .*, but was float64"),
    "state float64": (to("state", torch.float64), TypeError, "state should have dtype .*, but was float64"),
    "A_log float64": (to("A_log", torch.float64), TypeError, "A_log should have dtype .*, but was float64"),
    "dt_bias integer": (to("dt_bias", torch.int64), TypeError, "dt_bias should have dtype .*, but was int64"),
    "slots int16": (
        to("state_indices", torch.int16),
        TypeError,
        "state_indices should have dtype .* int16",
    ),
    "slots float": (to("state_indices", torch.float32), TypeError, "state_indices should have dtype .* float32"),
    "slots a list": ({"state_indices": [4, 0, 2]}, TypeError, "state_indices should be a tensor, but was list"),
    # shape
    "q 3-d": (new("q", B, T, K), ValueError, r"q should have shape \[B, T, H, K\], but was \[3, 4, 8\]"),
    "k other K": (new("k", B, T, H, 7), ValueError, r"k should have shape .*\[3, 4, 2, 8\], but was \[3, 4, 2, 7\]"),
    "k other heads": (new("k", B, T, 1, K), ValueError, r"k should have shape .* but was \[3, 4, 1, 8\]"),
    "v other T": (new("v", B, 3, HV, V), ValueError, r"v should have shape .* but was \[3, 3, 4, 6\]"),
    "v 3-d": (new("v", B, T, V), ValueError, r"v should have shape \[B, T, HV, V\] .* but was \[3, 4, 6\]"),
    "v heads": (new("v", B, T, 3, V), ValueError, "v should have a multiple of q's 2 heads, but had 3"),
    "g other heads": (
        new("g", B, T, H, K),
        ValueError,
        r"g should have .*\[3, 4, 4, 8\], but was \[3, 4, 2, 8\]",
    ),
    "g scalar heads": (new("g", B, T, H), ValueError, r"g should have shape .*\[3, 4, 4\], but was \[3, 4, 2\]"),
    "g 2-d": (new("g", B, T), ValueError, r"g should have shape .*\[B, T, HV\].* but was \[3, 4\]"),
    "g 5-d": (new("g", B, T, HV, K, 1), ValueError, r"g should have shape .* but was \[3, 4, 4, 8, 1\]"),
    "beta heads": (new("beta", B, T, H), ValueError, r"beta should have shape .*\[3, 4, 4\], but was \[3, 4, 2\]"),
    "state 3-d": (new("state", HV, V, K), ValueError, r"state should have shape .* but was \[4, 6, 8\]"),
    "state K-first": (
        new("state", 5, HV, K, V),
        ValueError,
        r"state .*\[any, 4, 6, 8\], but was \[5, 4, 8, 6\]",
    ),
    "too few slots": (
        {"state": lambda a: a["state"][:2], "state_indices": None},
        ValueError,
        "at least 3 slots.*had 2",
    ),
    "slots of another batch": (new("state_indices", 2, **INT), ValueError, r"state_indices .*\[3\], but was \[2\]"),
    "slots 2-d": (new("state_indices", B, 1, **INT), ValueError, r"state_indices should have .* but was \[3, 1\]"),
    "A_log per channel": (new("A_log", HV, K), ValueError, r"A_log should have shape \[HV\] = \[4\], but was \[4, 8\]"),
    "dt_bias per head": (new("dt_bias", HV), ValueError, r"dt_bias should .*\[HV, K\].* 32 elements, but was \[4\]"),
    "dt_bias transposed": (new("dt_bias", K, HV), ValueError, r"dt_bias should have shape .* but was \[8, 4\]"),
    # strides, sizes
    "state K strided": (
        {"state": lambda a: a["state"].transpose(-1, -2).contiguous().transpose(-1, -2)},
        ValueError,
        r"state should have K contiguous \(last stride 1\), but its strides were \[192, 48, 1, 6\]",
    ),
    "empty window": (
        {x: (lambda a, x=x: a[x][:, :0]) for x in ("q", "k", "v", "g", "beta")},
        ValueError,
        "the window T of q should be between 1 and 16 tokens, but was 0",
    ),
    # grad
    **{
        f"{name} requires grad": (
            grad(name),
            RuntimeError,
            f"{name} requires grad, but RecoverSSM is for inference only",
        )
        for name in ("q", "k", "v", "g", "beta", "state", "A_log", "dt_bias")
    },
    # device
    **{
        f"{name} elsewhere": (to(name, "meta"), ValueError, f"{name} {ERROR_DEVICE}")
        for name in ("q", "k", "v", "g", "beta", "state_indices", "A_log", "dt_bias")
    },
    # settings
    "A_log missing": (
        {"A_log": None, "lower_bound": None},
        ValueError,
        r"A_log should be a tensor \[HV\] for the unbounded gate \(lower_bound=None\), but was None",
    ),
    "lower_bound zero": ({"lower_bound": 0.0}, ValueError, "lower_bound should be negative or None, but was 0.0"),
    "lower_bound positive": ({"lower_bound": 5}, ValueError, "lower_bound should be negative or None, but was 5"),
    "lower_bound NaN": ({"lower_bound": float("nan")}, ValueError, "lower_bound should be negative .* but was nan"),
    "lower_bound a tensor": (
        new("lower_bound", 1),
        TypeError,
        "lower_bound should be a number .*was Tensor",
    ),
    "scale a string": ({"scale": "0.1"}, TypeError, "scale should be a number or None, but was str"),
    "pad_slot_id None": ({"pad_slot_id": None}, TypeError, "pad_slot_id should be an int, but was NoneType"),
    "max_seqlen unlike T": ({"max_seqlen": 5}, ValueError, "max_seqlen should be 4, the window of q,.* but was 5"),
    "neg_eigval of a plain beta": (
        {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval should be False when use_beta_sigmoid_in_kernel is False .* but was True",
    ),
    **{
        f"{name} of a precomputed gate": (
            {
                "use_gate_in_kernel": False,
                **{other: None for other in ("A_log", "dt_bias", "lower_bound") if other != name},
            },
            ValueError,
            f"{name} should be None when use_gate_in_kernel is False .* but was {was}",
        )
        for name, was in (("A_log", "a tensor"), ("dt_bias", "a tensor"), ("lower_bound", "-5.0"))
    },
}
PACKED = {
    "max_seqlen missing": (
        {"max_seqlen": None},
        ValueError,
        "max_seqlen should be the longest row's length.*None",
    ),
    "max_seqlen beyond": ({"max_seqlen": 17}, ValueError, "max_seqlen should be between 1 and 16 tokens, but was 17"),
    "max_seqlen zero": ({"max_seqlen": 0}, ValueError, "max_seqlen should be between 1 and 16 tokens, but was 0"),
    "max_seqlen a float": ({"max_seqlen": 4.0}, TypeError, "max_seqlen should be an int, but was float"),
    "max_seqlen a tensor": (new("max_seqlen", 1, **INT), TypeError, "max_seqlen should be an int, but was Tensor"),
    "rows longer than max_seqlen": (
        {"max_seqlen": 2},
        ValueError,
        "q should hold at most 3 rows of max_seqlen 2 ",
    ),
    "cu_seqlens float": (to("cu_seqlens", torch.float32), TypeError, "cu_seqlens should have dtype .* float32"),
    "cu_seqlens a list": ({"cu_seqlens": [0, 4, 5, 8]}, TypeError, "cu_seqlens should be a tensor, but was list"),
    "cu_seqlens elsewhere": (to("cu_seqlens", "meta"), ValueError, f"cu_seqlens {ERROR_DEVICE}"),
    "cu_seqlens 2-d": (new("cu_seqlens", 4, 1, **INT), ValueError, r"cu_seqlens should have shape \[B\+1\], but was"),
    "cu_seqlens empty": (
        new("cu_seqlens", 0, **INT),
        ValueError,
        r"cu_seqlens should have shape .* but was \[0\]",
    ),
    "dense with cu_seqlens": (
        new("q", 2, T, H, K),
        ValueError,
        r"q should have .*\[1, N, .* but was \[2, 4, 2, 8\]",
    ),
    "slots per token": (
        new("state_indices", 8, **INT),
        ValueError,
        r"state_indices should have .* but was \[8\]",
    ),
}


def check_refused(call, arguments, pool, change, exception, message):
    changed = arguments | {name: x(arguments) if callable(x) else x for name, x in change.items()}
    with pytest.raises(exception) as error:
        call(**changed)
    assert re.search(message, str(error.value)), f"wanted /{message}/, got: {error.value}"
    pool.check_unchanged()


@pytest.mark.parametrize("case", VERIFY)
def test_verify(device, case):
    check_refused(rs.kda_verify, *verify_arguments(device), *VERIFY[case])


@pytest.mark.parametrize("case", PACKED)
def test_verify_packed(device, case):
    check_refused(rs.kda_verify, *verify_arguments(device, packed=True), *PACKED[case])


@pytest.mark.parametrize("shape", [(HV, K), (HV * K,), (), (H,)])
def test_scalar_gate_bias(device, shape):
    message = r"dt_bias should have shape \[HV\] with 4 elements, but was "
    arguments, pool = verify_arguments(device, scalar_gate=True)
    check_refused(rs.kda_verify, arguments, pool, new("dt_bias", *shape), ValueError, message)


def test_scalar_bias_of_a_single_head(device):
    """A 0-d tensor has the one element that is wanted, but no axis."""
    window = make_window(1, 2, heads=1, value_heads=1, scalar_gate=True, device=device)
    window.options["dt_bias"] = torch.tensor(0.5, device=device)
    pool = guarded_pool(1, 1, 6, 8, device=device)
    with pytest.raises(ValueError, match=r"dt_bias should have shape \[HV\] with 1 elements, but was \[\]"):
        rs.kda_verify(*window.inputs, pool.state, **window.options)


@pytest.mark.parametrize("K, V, letter", [(257, 6, "K"), (8, 300, "V"), (0, 6, "K"), (8, 0, "V")])
def test_head_sizes(device, K, V, letter):
    window = make_window(1, 2, key_dim=K, value_dim=V, gate="precomputed", device=device)
    state = torch.zeros(1, 2, V, K, device=device)
    size = {"K": K, "V": V}[letter]
    with pytest.raises(ValueError, match=f"state should have head size {letter} between 1 and 256, but it was {size}"):
        rs.kda_verify(*window.inputs, state, **window.options)


def test_requires_grad_is_fine_without_grad_mode(device):
    arguments, _ = verify_arguments(device)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        arguments[name].requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, record = rs.kda_verify(**arguments)
            rs.kda_commit(arguments["state"], record, torch.ones(B, **INT, device=device))
        assert not o.requires_grad and not record.u.requires_grad

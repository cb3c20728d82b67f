"""causal_conv1d_verify against the token-by-token oracle: widths, windows, layouts, dtypes."""

import itertools

import pytest
import torch
from budget import assert_within_budget
from conv_cases import conv_oracle, guarded_conv_pool, make_conv_window
from pools import same_bits

import recoverssm_ops as rs

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [4, 0, 4, 1, 2, 3]
SLOTS = [7, 2, 5, 0, 8, 3]


def check_verify(window, pool, slots, index_dtype=torch.int64) -> None:
    index = None if slots is None else torch.tensor(slots, device=window.x.device, dtype=index_dtype)
    histories = pool.state[: len(window.lengths)] if slots is None else pool.state[slots]
    answer = conv_oracle(window, histories)
    y = rs.causal_conv1d_verify(*window.inputs, pool.state, index, **window.options)
    pool.check_unchanged()
    assert y.shape == window.x.shape and y.dtype == window.x.dtype and y.is_contiguous()
    assert_within_budget(torch.cat(window.rows(y)).cpu(), *answer.outputs())
    if "cu_seqlens" in window.options:
        assert y[:, sum(window.lengths) :].count_nonzero() == 0, "tokens in no row should be zeros"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", range(2, 9))
def test_product_of_options(device, width, activation, bias, packed):
    lengths, tail = (LENGTHS, 3) if packed else (None, 0)
    window = make_conv_window(
        6, 4, width=width, bias=bias, activation=activation, lengths=lengths, tail=tail, device=device
    )
    check_verify(window, guarded_conv_pool(9, 12, width, device=device), SLOTS)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=lambda d: f"pool={d}".replace("torch.", ""))
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: f"x={d}".replace("torch.", ""))
def test_dtypes(device, dtype, pool_dtype):
    for weight_dtype, lengths in itertools.product((dtype, torch.float32), (None, LENGTHS)):
        window = make_conv_window(6, 4, dtype=dtype, weight_dtype=weight_dtype, lengths=lengths, device=device)
        check_verify(window, guarded_conv_pool(9, 12, dtype=pool_dtype, device=device), SLOTS)


@pytest.mark.parametrize("T", range(1, 17))
def test_every_window(device, T):
    """Shorter and longer than the history."""
    for width in (2, 4, 8):
        window = make_conv_window(3, T, width=width, device=device, seed=T)
        check_verify(window, guarded_conv_pool(4, 12, width, device=device), [3, 0, 2])


@pytest.mark.parametrize("channels", [1, 3, 31, 64, 257, 1000])
def test_channels(device, channels):
    window = make_conv_window(2, 5, channels=channels, device=device)
    check_verify(window, guarded_conv_pool(3, channels, device=device), [2, 0])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(device, index_dtype):
    window = make_conv_window(6, 4, lengths=LENGTHS, index_dtype=index_dtype, device=device)
    check_verify(window, guarded_conv_pool(9, 12, device=device), SLOTS, index_dtype)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_row_number_is_the_slot_without_indices(device, lengths):
    window = make_conv_window(6, 4, lengths=lengths, device=device)
    check_verify(window, guarded_conv_pool(7, 12, device=device), None)


@pytest.mark.parametrize("first", [0, 2])
def test_packed_tokens_outside_all_rows(device, first):
    """Before the first row, after the last one: zeros, though the inputs there are NaN."""
    window = make_conv_window(3, 4, lengths=[2, 0, 4], device=device)
    ends = window.options["cu_seqlens"] + first
    garbage = torch.full((1, 3, 12), float("nan"), device=device)
    x = torch.cat([garbage[:, :first], window.x, garbage], 1)
    pool = guarded_conv_pool(3, 12, device=device)
    y = rs.causal_conv1d_verify(
        x, *window.inputs[1:], pool.state, **window.options | {"cu_seqlens": ends, "max_seqlen": 4}
    )
    expected = rs.causal_conv1d_verify(*window.inputs, pool.state, **window.options)
    assert same_bits(y[:, first : first + 6], expected)
    assert y[:, :first].count_nonzero() == 0 and y[:, first + 6 :].count_nonzero() == 0


def test_strided_inputs_give_the_same_bits(device):
    """Slices of a fused projection, channels-first activations, a transposed weight, a strided bias."""
    window = make_conv_window(3, 5, device=device)
    pool = guarded_conv_pool(3, 12, device=device)
    expected = rs.causal_conv1d_verify(*window.inputs, pool.state)
    fused = torch.full((3, 5, 30), float("nan"), device=device)
    fused[..., 11:23] = window.x
    columns = torch.full((12, 3), float("nan"), device=device)
    columns[:, 1] = window.bias
    forms = {
        "slice": (fused[..., 11:23], window.weight, columns[:, 1]),
        "channels first": (window.x.mT.contiguous().mT, window.weight.t().contiguous().t(), window.bias),
        "tokens first": (window.x.transpose(0, 1).contiguous().transpose(0, 1), window.weight, window.bias),
    }
    for name, inputs in forms.items():
        y = rs.causal_conv1d_verify(*inputs, pool.state)
        assert y.is_contiguous(), name
        assert_within_budget(y.cpu(), expected.double().cpu(), expected.cpu(), name=name)
    layouts = [
        torch.empty_strided((3, 12, 3), stride, device=device).copy_(pool.state) for stride in ((36, 1, 12), (3, 9, 1))
    ]
    for state in layouts:
        assert same_bits(rs.causal_conv1d_verify(*window.inputs, state), expected)


@pytest.mark.parametrize("shape", [(0, 4), (1, 0)], ids=["no rows", "no tokens"])
def test_nothing_to_do(device, shape):
    packed = shape[1] == 0
    window = make_conv_window(2, 4, lengths=[0, 0] if packed else None, device=device)
    x = window.x if packed else window.x[:0]
    pool = guarded_conv_pool(2, 12, device=device)
    slots = torch.tensor([1, 0] if packed else [], dtype=torch.int32, device=device)
    y = rs.causal_conv1d_verify(x, *window.inputs[1:], pool.state, slots, **window.options)
    assert y.shape == x.shape
    rs.causal_conv1d_commit(pool.state, x, torch.ones_like(slots), slots, **window.layout)
    pool.check_unchanged()

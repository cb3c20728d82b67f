"""The pass puts the operators in the place of a short convolution and its history's update, and leaves look-alikes alone."""

import itertools
import random

import conv_layers as conv
import pytest
import torch
import torch.nn.functional as F
from conv_layers import layer, make_inputs
from rewriting import DROPS_ROUND_TRIPS, calls, copied, run_rewritten
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

import recoverssm_ops.conv_ops as ops

aten = torch.ops.aten
FUNCTIONAL = (auto_functionalized, auto_functionalized_v2)


def commits(graph) -> list:
    return [n for form in FUNCTIONAL for n in calls(graph, form) if n.args == (ops.causal_conv1d_commit,)]


def verify_arguments(graph) -> dict:
    (node,) = calls(graph, ops.causal_conv1d_verify)
    names = [a.name for a in ops.causal_conv1d_verify._schema.arguments]
    return dict(zip(names, node.args, strict=True))


def check_replaced(fn, inputs, dynamic=False, activation=True, **options):
    """Both operators and nothing of the model's own convolution; outputs within rounding of float64, histories bit by bit."""
    args, expected = inputs, copied(inputs)
    oracle = fn(*(x.double() if x.is_floating_point() else x for x in copied(inputs)))
    result, seen = run_rewritten(fn, *args, dynamic=dynamic, convolutions=True, **options)
    eager = fn(*expected)
    assert [c.reason for c in seen.report.convolutions] == [None] and seen.report.convolutions_replaced == 1
    assert seen.report.layers == []
    graph = seen.graph
    assert len(commits(graph)) == 1 and verify_arguments(graph)["silu"] is activation
    left = [
        aten.convolution.default,
        aten.index_put.default,
        aten.gather.default,
        aten.unfold.default,
        aten.cat.default,
    ]
    assert not any(calls(graph, target) for target in left), graph
    assert torch.equal(args[0], expected[0])
    assert result.dtype == eager.dtype and result.shape == eager.shape
    band = torch.finfo(eager.dtype).eps * oracle.abs().clamp_min(1)
    worst = ((eager.double() - oracle).abs() / band).max()
    assert ((result.double() - oracle).abs() / band).max() <= 2 * worst + 1
    return graph


# --- what is recognised -------------------------------------------------------------------------------------------------

SPELLINGS = {
    "library": layer(),
    "padded": layer(conv.padded),
    "shifted": layer(conv.shifted),
    "sliding": layer(conv.sliding),
    "einsum": layer(conv.einsum),
    "stacked_taps": layer(conv.stacked_taps),
    "each_token": layer(conv.each_token),
    "newest_first": layer(conv.newest_first),
    "scaled": layer(conv.scaled),
    "joined_tokens": layer(join=conv.joined_tokens),
    "joined_columns": layer(conv.each_token, join=conv.joined_columns),
    "joined_slices": layer(conv.shifted, join=conv.joined_slices),
    "take_along": layer(advance=conv.take_along),
    "indexed": layer(advance=conv.indexed),
    "from_the_end": layer(advance=conv.from_the_end),
    "sliding_history": layer(advance=conv.sliding_history),
    "stacked_histories": layer(advance=conv.stacked_histories),
    "all_accepted": layer(advance=conv.all_accepted),
}
WITHOUT_ACTIVATION = ("sliding", "stacked_taps")  # another one, which stays in the graph, or none


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    check_replaced(SPELLINGS[name], make_inputs(), activation=name not in WITHOUT_ACTIVATION)


@pytest.mark.parametrize("name", ["library", "sliding", "each_token"])
def test_dynamic_batch(name):
    inputs = make_inputs()
    for x in (inputs[1], inputs[2], inputs[5]):
        torch._dynamo.mark_dynamic(x, 0)
    check_replaced(SPELLINGS[name], inputs, dynamic=None, activation=name not in WITHOUT_ACTIVATION)


@pytest.mark.parametrize("shape", [{"W": 2}, {"T": 2}, {"T": conv.W - 1}, {"B": 1}, {"W": 8, "T": 16}], ids=str)
def test_shapes(shape):
    inputs = make_inputs(**shape)
    check_replaced(layer(conv.shifted, conv.indexed), inputs)


def test_slots_are_rows_of_a_buffer():
    def run(history, x, weight, bias, n):
        extended = conv.joined(history, x)
        y = conv.library(extended, weight, bias)
        history.copy_(conv.gathered(extended, n, history.shape[2]))
        return y

    pool, _, *rest = make_inputs()
    graph = check_replaced(run, (pool[: conv.B].clone(), *rest))
    assert verify_arguments(graph)["conv_state_indices"] is None


def test_padding_is_no_slot_and_integers_keep_their_dtype():
    pool, slots, *rest, n = make_inputs()
    graph = check_replaced(layer(), (pool, slots.int(), *rest, n.int()))
    # What counts from the end is made a slot, which the operators would take for padding.
    assert verify_arguments(graph)["conv_state_indices"].target is aten.where.self


def second_reader_of_the_pool(pool, slots, x, weight, bias, n):
    """Its own gather and join: what it reads is the pool as it was, whoever else reads it."""
    other = conv.joined(pool[slots], x)
    return layer()(pool, slots, x, weight, bias, n), other.sum(-1)


def test_another_reader_of_the_pool_keeps_its_own_code():
    args, expected = make_inputs(), make_inputs()
    result, seen = run_rewritten(second_reader_of_the_pool, *args, dynamic=False, convolutions=True, check=True)
    torch.testing.assert_close((result, args[0]), (second_reader_of_the_pool(*expected), expected[0]))
    assert seen.report.convolutions_replaced == 1


JOINS = (conv.joined, conv.joined_tokens, conv.joined_columns, conv.joined_slices)
CONVOLUTIONS = (conv.library, conv.padded, conv.shifted, conv.sliding, conv.einsum, conv.stacked_taps, conv.each_token)
ADVANCES = (
    conv.gathered,
    conv.take_along,
    conv.indexed,
    conv.from_the_end,
    conv.sliding_history,
    conv.stacked_histories,
)


KINDS = ({}, {"dtype": torch.bfloat16}, {"W": 2, "T": 3}, {"T": 3}, {"B": 1})
COMBINATIONS = random.Random(0).sample(list(itertools.product(JOINS, CONVOLUTIONS, ADVANCES, KINDS)), 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("join", "convolve", "advance", "kinds"), COMBINATIONS)
def test_combination(join, convolve, advance, kinds):
    fn = layer(convolve, advance, join, start=torch.Tensor.float if kinds.get("dtype") else lambda x: x)
    args, expected = make_inputs(**kinds), make_inputs(**kinds)
    result, seen = run_rewritten(fn, *args, dynamic=False, convolutions=True, check=True)
    assert [c.reason for c in seen.report.convolutions] == [None]
    torch.testing.assert_close(result, fn(*expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(args[0], expected[0])


# --- rounding -----------------------------------------------------------------------------------------------------------

HALVES = {
    # The library rounds before the activation, which therefore stays where it is.
    "library": (layer(), {}, False),
    "float32_inside": (layer(lambda e, w, b: conv.shifted(e, w, b).bfloat16(), start=torch.Tensor.float), {}, True),
    "float32_after": (layer(lambda e, w, b: conv.shifted(e, w.float(), b), start=torch.Tensor.float), {}, True),
    "float32_inputs": (layer(conv.shifted), {"dtype": torch.float32, "pool_dtype": torch.bfloat16}, True),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_precision_rounds_where_the_model_does(name):
    fn, kinds, activation = HALVES[name]
    graph = check_replaced(fn, make_inputs(**{"dtype": torch.bfloat16, **kinds}), activation=activation)
    if name == "float32_inside":  # nothing is converted before the operator, which rounds by itself
        assert verify_arguments(graph)["x"].op == "placeholder"


# --- look-alikes --------------------------------------------------------------------------------------------------------


def case(reason, fn, **inputs):
    return reason, fn, inputs


def other_slots(pool, slots, x, weight, bias, n):
    extended = conv.joined(pool[slots], x)
    pool[(slots + 1) % pool.shape[0]] = conv.gathered(extended, n, pool.shape[2])
    return conv.library(extended, weight, bias)


def added_to_the_pool(pool, slots, x, weight, bias, n):
    extended = conv.joined(pool[slots], x)
    pool.index_put_((slots,), conv.gathered(extended, n, pool.shape[2]), accumulate=True)
    return conv.library(extended, weight, bias)


def old_history_returned(pool, slots, x, weight, bias, n):
    history = pool[slots]
    extended = conv.joined(history, x)
    y = conv.library(extended, weight, bias)
    pool[slots] = conv.gathered(extended, n, pool.shape[2])
    return y, history.sum()


def update_of_another_window(pool, slots, x, weight, bias, n):
    history = pool[slots]
    y = conv.library(conv.joined(history, x), weight, bias)
    pool[slots] = conv.gathered(conv.joined(history, x * 0.5), n, pool.shape[2])
    return y


def tokens_first_pool(pool, slots, x, weight, bias, n):
    pool = pool.transpose(1, 2)
    extended = conv.joined(pool[slots], x)
    y = conv.library(extended, weight, bias)
    pool[slots] = conv.gathered(extended, n, pool.shape[2])
    return y


def dense(extended, weight, bias):
    return F.conv1d(extended, weight.unsqueeze(1).repeat(1, weight.shape[0], 1)).transpose(1, 2)


def grouped(extended, weight, bias):
    return F.conv1d(extended, weight.unsqueeze(1).repeat(1, 2, 1), groups=weight.shape[0] // 2).transpose(1, 2)


def dilated(extended, weight, bias):
    return F.conv1d(extended, weight[:, :2].unsqueeze(1), dilation=3, groups=weight.shape[0]).transpose(1, 2)


def one_tap_less(extended, weight, bias):
    return conv.shifted(extended[..., 1:], weight[:, 1:], bias)


def weights_of_a_position(extended, weight, bias):
    windows = [extended[..., t : t + conv.W] for t in range(conv.T)]
    return torch.stack([(x * weight * (t + 1)).sum(-1) for t, x in enumerate(windows)], 1)


def weights_of_a_row(extended, weight, bias):
    return (extended.unfold(-1, conv.W, 1) * (weight.unsqueeze(1) * extended[..., -1:].unsqueeze(-1))).sum(-1)


def reversed_history(extended, n, kept):
    return conv.gathered(extended, n, kept).flip(-1)


def every_second_column(extended, n, kept):
    return conv.indexed(extended, n - n, 2 * kept)[..., ::2]


def count_of_a_channel(extended, n, kept):
    counts = (n.unsqueeze(-1) + torch.arange(extended.shape[1])) % (conv.T + 1)
    return extended.gather(-1, counts.unsqueeze(-1) + torch.arange(kept))


def history_of_float(pool, slots, x, weight, bias, n):
    extended = conv.joined(pool[slots].to(x.dtype), x)
    y = conv.library(extended, weight, bias)
    pool[slots] = conv.gathered(extended, n, pool.shape[2]).to(pool.dtype)
    return y


BF16 = {"dtype": torch.bfloat16}
LOOK_ALIKES = {
    "other_slots": case("other_slots", other_slots),
    "added_to_the_pool": case("other_slots", added_to_the_pool),
    "no_update": case("no_update", lambda p, s, x, w, b, n: conv.library(conv.joined(p[s], x), w, b)),
    "sequence_returned": case("history_escapes", layer(finish=lambda y, extended: (y, extended[..., 1:]))),
    "old_history_returned": case("history_escapes", old_history_returned),
    "two_convolutions": case(
        "history_escapes", layer(lambda e, w, b: conv.library(e, w, b) - conv.library(e, w * 2, b))
    ),
    "update_of_another_window": case("history_mismatch", update_of_another_window),
    "reversed_history": case("history_mismatch", layer(advance=reversed_history)),
    "every_second_column": case("history_mismatch", layer(advance=every_second_column)),
    "count_of_a_channel": case("history_mismatch", layer(advance=count_of_a_channel)),
    "dense": case("not_depthwise", layer(dense)),
    "grouped": case("not_depthwise", layer(grouped)),
    "dilated": case("taps_mismatch", layer(dilated)),
    "one_tap_less": case("taps_mismatch", layer(one_tap_less)),
    "weights_of_a_row": case("taps_mismatch", layer(weights_of_a_row)),
    "weights_of_a_position": case("taps_mismatch", layer(weights_of_a_position)),
    "rounded_products": case("rounded_products", layer(conv.shifted), **BF16),
    "rounded_history": case("rounded_products", history_of_float, pool_dtype=torch.float32, **BF16),
    "float64": case("unsupported_dtype", layer(conv.shifted), dtype=torch.float64),
    "window_too_long": case("window_too_long", layer(conv.shifted), T=17),
    "no_products": case("no_convolution", layer(lambda e, w, b: e[..., conv.W - 1 :].exp().neg())),
}


def check_left(reason, fn, args):
    expected = copied(args)
    result, seen = run_rewritten(fn, *args, dynamic=False, convolutions=True)
    if reason == "rounded_products" and not seen.rounds:
        pytest.skip(DROPS_ROUND_TRIPS)
    assert [c.reason for c in seen.report.convolutions] == ([] if reason is None else [reason])
    assert seen.untouched
    torch.testing.assert_close((result, args[0]), (fn(*expected), expected[0]))


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_left_alone(name):
    reason, fn, inputs = LOOK_ALIKES[name]
    check_left(reason, fn, make_inputs(**inputs))


def test_channels_last_pool_is_left_alone():
    pool, *rest = make_inputs()
    check_left("unsupported_layout", tokens_first_pool, (pool.transpose(1, 2).contiguous(), *rest))


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(layer(lambda e, w, b: e.mean(-1)), id="nothing_multiplies"),
        pytest.param(lambda p, s, x, w, b, n: F.silu(x * p[s].sum(-1).unsqueeze(1)), id="no_sequence"),
    ],
)
def test_what_is_no_convolution_is_not_reported(fn):
    check_left(None, fn, make_inputs())


def test_one_token_is_no_window():
    args = make_inputs(T=1)
    check_left(None, layer(conv.shifted), args)

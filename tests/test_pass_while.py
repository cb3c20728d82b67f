"""A window written as ``while_loop``: written out where the number of its iterations is known, else left as it is."""

import pytest
import torch
from plain_layers import H, K, T, V, layer, make_inputs, plain_step
from rewriting import calls, run_rewritten
from torch._higher_order_ops.while_loop import while_loop

import recoverssm_ops.ops as ops

# --- how a position is looked up and written ----------------------------------------------------------------------------


def mask(i, x):
    return (torch.arange(T, device=x.device) == i).view(1, T, *[1] * (x.ndim - 2))


def select(x, i):
    return x.index_select(1, i.view(1)).squeeze(1)


def index(x, i):
    return x[:, i.view(1)][:, 0]


def narrow(x, i):
    return x.narrow(1, i, 1).squeeze(1)


def one_hot(x, i):
    return (x * mask(i, x)).sum(1)


def index_copy(whole, i, x):
    return whole.index_copy(1, i.view(1), x.unsqueeze(1))


def in_place(whole, i, x):
    whole = whole.clone()
    whole[:, i.view(1)] = x.unsqueeze(1)
    return whole


def where(whole, i, x):
    return torch.where(mask(i, whole), x.unsqueeze(1), whole)


def slice_scatter(whole, i, x):
    return whole.slice_scatter(x.unsqueeze(1), 1, i, i + 1)


def below(i, n):
    return i < T


def zero(n):
    return torch.zeros((), dtype=torch.int64)


def advance(i):
    return i + 1


def looped(read=select, write=index_copy, start=zero, going=below, step=plain_step, advance=advance):
    def run(pool, slots, q, k, v, g, beta, n):
        S = pool[slots]

        def condition(i, S, states, outs):
            return going(i, n)

        def body(i, S, states, outs):
            S, o = step(S, *(read(x, i) for x in (q, k, v, g, beta)))
            return advance(i), S, write(states, i, S), write(outs, i, o)

        empty = S.new_zeros(S.shape[0], T, H, V, K), v.new_zeros(S.shape[0], T, H, V)
        _, _, states, outs = while_loop(condition, body, (start(n), S, *empty))
        pool[slots] = states[torch.arange(S.shape[0]), n - 1]
        return outs, None

    return run


FORMS = {
    "index_select": looped(),
    "index": looped(index, in_place),
    "where": looped(select, where),
    "counter_is_an_int": looped(narrow, slice_scatter, lambda n: 0),
    "counts_down": looped(
        lambda x, i: index(x, T - 1 - i),
        lambda whole, i, x: where(whole, T - 1 - i, x),
        start=lambda n: torch.full((), T - 1),
        going=lambda i, n: i >= 0,
        advance=lambda i: i - 1,
    ),
}


CASES = [*((name, False) for name in FORMS), ("index_select", True)]


@pytest.mark.parametrize(("name", "dynamic"), CASES, ids=lambda x: {False: "static", True: "dynamic"}.get(x, x))
def test_the_window_is_rewritten(name, dynamic):
    args, plain = make_inputs(), make_inputs()
    (o, _), seen = run_rewritten(FORMS[name], *args, dynamic=dynamic)
    torch.testing.assert_close((o, args[0]), (layer()(*plain)[0], plain[0]))
    assert [layer.form for layer in seen.report.layers] == ["commit"]
    assert not calls(seen.graph, torch.ops.higher_order.while_loop) and len(calls(seen.graph, ops.kda_verify)) == 1


def odd_step(S, *inputs):
    S, o = plain_step(S, *inputs)
    return S.tanh(), o


UNKNOWN = {
    "until_the_data_says_so": looped(going=lambda i, n: (i < T) & (n.sum() > 0)),
    "from_where_the_data_says": looped(start=lambda n: n.min() - 1),
    "read_by_weights": looped(one_hot, where),
    "one_token": looped(going=lambda i, n: i < 1),
    "more_tokens_than_a_window": looped(
        lambda x, i: select(x, i % T), lambda x, i, S: index_copy(x, i % T, S), going=lambda i, n: i < 17
    ),
}


def by_a_step_of_the_data(pool, slots, q, k, v, g, beta, n):
    return looped(advance=lambda i: i + n.min())(pool, slots, q, k, v, g, beta, n)


LEFT = {**UNKNOWN, "by_a_step_of_the_data": by_a_step_of_the_data, "look_alike": looped(step=odd_step)}


@pytest.mark.parametrize("name", LEFT)
def test_other_loops_are_left_alone(name):
    _, seen = run_rewritten(LEFT[name], *make_inputs(), dynamic=False)
    assert (
        seen.report.matched == 0 and seen.untouched and len(calls(seen.graph, torch.ops.higher_order.while_loop)) == 1
    )
    assert [layer.reason for layer in seen.report.layers] == (["non_uniform_step"] if name == "look_alike" else [])


def test_compiled_by_inductor(device):
    args, plain = ([x.to(device) for x in make_inputs()] for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad():
        o, _ = torch.compile(FORMS["index_select"], backend="recoverssm")(*args)
    torch.testing.assert_close((o, args[0]), (layer()(*plain)[0], plain[0]), atol=1e-4, rtol=1e-4)

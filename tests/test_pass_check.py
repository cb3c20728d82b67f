"""``check=True`` accepts every right rewrite, and catches wrong ones whatever part of the edit is broken."""

import pytest
import torch
from rewriting import copied, run_rewritten
from small_layer import layer, make_inputs, select, token
from spellings import Spelling, Step, inputs
from test_pass_spellings import PARTICULAR, SAMPLE
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.utils import _pytree as pytree

import compile_passes.replacing.replace as replace
import recoverssm_ops.ops as ops
from compile_passes import RecoverSSMPass, RewriteCheckError, recoverssm_passes
from compile_passes.checking import check
from compile_passes.install import SLOT
from compile_passes.matching import fold

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_caches():
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def rewrite_checked(s: Spelling, caplog):
    dynamic = {"static": False, "batch_dynamic": None, "all_dynamic": True}[s.shapes]
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)  # a position as a number is part of the graph
    with scalars, caplog.at_level("DEBUG", "compile_passes"):
        _, seen = run_rewritten(Step(s), *inputs(s), dynamic=dynamic, check=True)
    messages = [r.getMessage() for r in caplog.records if r.name == "compile_passes"]
    return seen, messages


QUICK = {*SAMPLE[::4], *PARTICULAR[::3]}


@pytest.mark.parametrize(
    "spelling",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.exhaustive) for x in (*SAMPLE, *PARTICULAR)],
    ids=str,
)
def test_every_spelling_passes(spelling, caplog):
    seen, messages = rewrite_checked(spelling, caplog)
    assert seen.report.matched == spelling.layers
    checked, unchecked = (sum(text in m for m in messages) for text in ("checked the rewrite", "could not check"))
    # A position that the model reads as a number (``.item()``) is not a value that the check could always draw.
    assert checked == spelling.layers or (spelling.selection == "scalar" and checked + unchecked == spelling.layers)


# --- what a broken pass would do ----------------------------------------------------------------------------------------
# Each breaks the edited graph right after ``Replacement.apply``: one argument of an operator, or one node.

VERIFY = [a.name for a in ops.kda_verify._schema.arguments]


def verify_argument(name, change):
    def broken(graph):
        (node,) = graph.find_nodes(op="call_function", target=ops.kda_verify)
        arguments = dict(zip(VERIFY, node.args, strict=True))
        arguments[name] = change(graph, node, arguments[name])
        node.args = tuple(arguments.values())

    return broken


def commit_argument(name, change):
    def broken(graph):
        (node,) = graph.find_nodes(op="call_function", target=auto_functionalized_v2)
        node.kwargs = {**node.kwargs, name: change(graph, node, node.kwargs[name])}

    return broken


def recover_argument(graph):
    (node,) = graph.find_nodes(op="call_function", target=ops.kda_recover)
    node.args = (*node.args[:4], before(graph, node, aten.sub.Tensor, node.args[4], 1), *node.args[5:])


def before(graph, node, target, *args):
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta["val"] = next(a for a in args if isinstance(a, torch.fx.Node)).meta["val"]
    return new


def flipped(graph, node, x):
    return before(graph, node, aten.flip.default, x, [1])


def slots_as_given(graph, node, rows):
    """Without the arithmetic that makes a slot that counts from the end a slot, and no padding."""
    assert rows.target is aten.where.self
    return rows.args[2]


def outputs_stacked_backwards(graph):
    """The tokens' outputs are right one by one, and wrong where the model stacks them."""
    (end,) = graph.find_nodes(op="output")
    (view,) = [n for n in end.args[0] if n.meta["val"].shape == (3, 3, 2, 6)]
    whole = view.args[0]  # Inductor stacks by cat and view
    backwards = flipped(graph, whole.next, whole)
    whole.replace_all_uses_with(backwards, delete_user_cb=lambda user: user is not backwards)


BROKEN = {
    "other_scale": (verify_argument("scale", lambda g, n, x: x * 1.000001), "output of token 0 by 1e-06"),
    "norm_forgotten": (verify_argument("use_qk_l2norm_in_kernel", lambda g, n, x: False), "output of token 0"),
    "bias_forgotten": (verify_argument("dt_bias", lambda g, n, x: None), "output of token 0"),
    "beta_doubled": (verify_argument("allow_neg_eigval", lambda g, n, x: True), "output of token 0"),
    "other_gate": (verify_argument("lower_bound", lambda g, n, x: -5.0), "output of token 0"),
    "values_backwards": (verify_argument("v", flipped), "output of token"),
    "q_for_k": (verify_argument("k", lambda g, n, x: n.args[0]), "output of token 0"),
    "negative_slots_are_padding": (verify_argument("state_indices", slots_as_given), "output of token 0"),
    "one_token_less": (commit_argument("length", lambda g, n, x: before(g, n, aten.sub.Tensor, x, 1)), "pool"),
    "commit_without_bias": (commit_argument("dt_bias", lambda g, n, x: None), "pool"),
    "commit_without_norm": (commit_argument("use_qk_l2norm_in_kernel", lambda g, n, x: False), "pool"),
    "other_slots": (commit_argument("dest", lambda g, n, x: before(g, n, aten.flip.default, x, [0])), "pool"),
}


def break_with(monkeypatch, broken):
    def apply(self, graph, method=replace.Replacement.apply):
        method(self, graph)
        broken(graph)

    monkeypatch.setattr(replace.Replacement, "apply", apply)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_b29_a_broken_rewrite_is_caught(name, dynamic, monkeypatch):
    broken, where = BROKEN[name]
    s = Spelling(gate="unbounded")
    break_with(monkeypatch, broken)
    with pytest.raises(Exception, match=rf"(?s)RewriteCheckError.*spellings\.py:.*{where}"):
        run_rewritten(Step(s), *inputs(s), dynamic=dynamic, check=True)


def test_without_the_check_a_broken_rewrite_goes_unseen(monkeypatch):
    break_with(monkeypatch, BROKEN["one_token_less"][0])
    assert run_rewritten(Step(Spelling(T=2)), *inputs(Spelling(T=2)))[1].report.matched == 1


def test_a_broken_recovered_state_is_caught(monkeypatch):
    s = Spelling(checkpoint="functional")
    break_with(monkeypatch, recover_argument)
    with pytest.raises(Exception, match=r"RewriteCheckError.*selected state by"):
        run_rewritten(Step(s), *inputs(s), check=True)


def test_stacked_outputs_are_checked_as_the_model_stacks_them(monkeypatch):
    break_with(monkeypatch, outputs_stacked_backwards)
    with pytest.raises(Exception, match=r"RewriteCheckError.*in float64\): outputs \("):
        run_rewritten(Step(Spelling()), *inputs(Spelling()), check=True)


def test_a_difference_below_float32_rounding_is_caught(monkeypatch):
    """A pass that took 1e-5 for the operator's 1e-6 under the root."""

    def normalised(S, q, k, v, g, beta):
        return token(S, *(x * torch.rsqrt(x.square().sum(-1, True) + 1e-5) for x in (q, k)), v, g, beta)

    monkeypatch.setattr(fold, "L2NORM_EPS", 1e-5)
    with pytest.raises(Exception, match=r"RewriteCheckError.*output of token 0 by \d(\.\d)?e-0[67]"):
        run_rewritten(layer(normalised), *make_inputs(), check=True)


# --- what a user of it relies on ----------------------------------------------------------------------------------------


def test_inputs_that_are_computed_twice_are_one_value(caplog):
    """Correction and update each scale the key: the check must not take the two for independent values."""

    def twice(S, q, k, v, g, beta):
        S = S * g.exp().unsqueeze(-2)
        u = beta.unsqueeze(-1) * (v - (S * (k * 1.5).unsqueeze(-2)).sum(-1))
        S = S + u.unsqueeze(-1) * (k * 1.5).unsqueeze(-2)
        return S, (S * q.unsqueeze(-2)).sum(-1)

    def slots_computed_twice(pool, slots, q, k, v, g, beta, n):
        S, outs, states = pool[slots // 2 * 2], [], []
        for t in range(q.shape[1]):
            S, o = twice(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
            outs.append(o)
            states.append(S)
        pool[slots // 2 * 2] = select(torch.stack(states, 1), n)
        return torch.stack(outs, 1)

    pool, _, *rest = make_inputs()
    with caplog.at_level("DEBUG", "compile_passes"):
        _, seen = run_rewritten(slots_computed_twice, pool, torch.tensor([4, 0, 2]), *rest, check=True)
    assert seen.report.matched == 1 and "checked the rewrite" in caplog.text


def test_values_and_random_state_are_left_alone():
    s = Spelling(T=2, layers=2)
    args, expected = inputs(s), inputs(s)
    before = torch.get_rng_state()
    added = RecoverSSMPass(check=True)
    with torch.no_grad():
        result = torch.compile(Step(s), options={SLOT: added})(*args)
    assert added.last_report.matched == 2 and torch.equal(torch.get_rng_state(), before)
    eager = Step(s)(*expected)
    for x, y in zip(*map(pytree.tree_leaves, ((result, args[0]), (eager, expected[0]))), strict=True):
        torch.testing.assert_close(x, y)


def test_the_same_numbers_every_time(monkeypatch):
    break_with(monkeypatch, BROKEN["one_token_less"][0])

    def message() -> str:
        with pytest.raises(Exception, match="RewriteCheckError") as caught:
            run_rewritten(Step(Spelling(T=2)), *inputs(Spelling(T=2)), check=True)
        return str(caught.value).split("RewriteCheckError")[-1].split("This is a bug")[0]

    assert message() == message()


def test_a_large_pool_is_not_copied_whole(monkeypatch, caplog):
    monkeypatch.setattr(check, "LARGE_POOL", 0)
    used = []
    monkeypatch.setattr(check.Piece, "run", after_noting(check.Piece.run, used))
    seen, messages = rewrite_checked(Spelling(T=2, B=2), caplog)
    assert seen.report.matched == 1 and any("checked the rewrite" in m for m in messages)
    assert max(rows for rows, *_ in used) == 3, "two rows and one that nobody uses, of five"


def after_noting(run, used):
    def noting(self, values, *rest):
        used.extend(x.shape for x in values.values() if isinstance(x, torch.Tensor) and x.ndim == 4)
        return run(self, values, *rest)

    return noting


def test_original_that_does_not_run_by_itself_is_a_warning(monkeypatch, caplog):
    def fails(self, *values):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(check.Piece, "run", fails)
    seen, messages = rewrite_checked(Spelling(T=2), caplog)
    assert seen.report.matched == 1
    assert any("could not check the rewrite" in m and "no kernel" in m for m in messages)


def test_b26_uuid_tells_a_checked_graph_from_an_unchecked_one():
    assert RecoverSSMPass(check=True).uuid() != RecoverSSMPass().uuid()


def test_context_takes_the_option(monkeypatch):
    break_with(monkeypatch, BROKEN["one_token_less"][0])
    s = Spelling(T=2)
    with torch.no_grad(), recoverssm_passes(check=True), pytest.raises(Exception, match="RewriteCheckError"):
        torch.compile(Step(s))(*inputs(s))
    assert issubclass(RewriteCheckError, RuntimeError)
    torch._dynamo.reset()
    args, expected = copied(inputs(s)), inputs(s)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(Step(s))(*args), Step(s)(*expected))

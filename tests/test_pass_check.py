"""``check=True`` accepts every right rewrite, and catches wrong ones whatever part of the edit is broken."""

import pytest
import torch
from rewriting import copied, run_rewritten
from spellings import Spelling, Step, inputs
from test_pass_near_misses import layer, make_inputs, plain_step
from test_pass_spellings import PARTICULAR, SAMPLE
from torch.utils import _pytree as pytree

import compile_passes.replace as replace
from compile_passes import RecoverSSMPass, RewriteCheckError, check, fold, recoverssm_passes
from compile_passes.install import SLOT
from compile_passes.operands import Operands


@pytest.fixture(autouse=True)
def no_caches():
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def rewrite_checked(s: Spelling, caplog):
    dynamic = {"static": False, "batch_dynamic": None, "all_dynamic": True}[s.shapes]
    with caplog.at_level("DEBUG", "compile_passes"):
        _, seen = run_rewritten(Step(s), *inputs(s), dynamic=dynamic, check=True)
    messages = [r.getMessage() for r in caplog.records if r.name == "compile_passes"]
    return seen, messages


# test_pass_spellings.py runs all of them with the check on.
@pytest.mark.parametrize("spelling", [*SAMPLE[::8], *PARTICULAR[::3]], ids=str)
def test_spelling_passes(spelling, caplog):
    seen, messages = rewrite_checked(spelling, caplog)
    assert seen.report.matched == spelling.layers
    assert sum("checked the rewrite" in m for m in messages) == spelling.layers
    assert not any("could not check" in m for m in messages)


# --- what a broken pass would do ----------------------------------------------------------------------------------------


def after(method, change):
    """The method with its result changed."""

    def broken(*args, **kwargs):
        return change(method(*args, **kwargs))

    return broken


def other_scale(monkeypatch):
    monkeypatch.setattr(Operands, "_fold_gate", after_scaling(Operands._fold_gate))


def after_scaling(method):
    def broken(self):
        self.scale *= 1.000001
        return method(self)

    return broken


def bias_forgotten(monkeypatch):
    monkeypatch.setattr(fold, "gate", after(fold.gate, lambda g: g and fold.Gate(g.g, g.A_log, None, g.lower_bound)))


def looser_epsilon(monkeypatch):
    """Recognises norms that the operator does not compute."""
    monkeypatch.setattr(fold, "L2NORM_EPS", 1e-5)


def one_token_further(monkeypatch):
    def broken(self, method=replace.Replacement._num_accepted):
        leaves, n = method(self)
        return leaves, lambda u, tensors: n(u, tensors) + 1

    monkeypatch.setattr(replace.Replacement, "_num_accepted", broken)


def always_the_last_token(monkeypatch):
    def broken(self, method=replace.Replacement._num_accepted):
        leaves, n = method(self)
        return leaves, lambda u, tensors: torch.full_like(n(u, tensors), self.window.length)

    monkeypatch.setattr(replace.Replacement, "_num_accepted", broken)


def negative_slots_are_padding(monkeypatch):
    def broken(self, values):
        pool = values.tensors[self.pool.node]
        return pool, values.integer(self.pool.slots, [self.window.roles.batch])

    monkeypatch.setattr(replace.Replacement, "_checkpoints", broken)


def tokens_backwards(monkeypatch):
    def broken(self, values, name, method=Operands.tensor):
        x = method(self, values, name)
        return x.flip(1) if name == "v" else x

    monkeypatch.setattr(Operands, "tensor", broken)


def outputs_stacked_backwards(monkeypatch):
    """The tokens' outputs are right one by one, and wrong where the model stacks them."""

    def broken(element, axes, method=replace._view):
        stacked = any(axis is not None and axis.name == "t" for axis in axes)
        view = method(element, axes)
        return (lambda x: view(x).flip(1)) if stacked else view

    monkeypatch.setattr(replace, "_view", broken)


EPSILON = layer(
    lambda S, q, k, v, g, beta: plain_step(
        S, *(x * torch.rsqrt(x.square().sum(-1, True) + 1e-5) for x in (q, k)), v, g, beta
    )
)


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (other_scale, "output of token 0"),
        (bias_forgotten, "output of token 0"),
        (one_token_further, "pool"),
        (always_the_last_token, "pool"),
        (negative_slots_are_padding, "pool"),
        (tokens_backwards, "output of token"),
        (outputs_stacked_backwards, r"differs from the original .*: outputs \("),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_b29_a_broken_rewrite_is_caught(broken, where, dynamic, monkeypatch):
    s = Spelling(gate="unbounded")
    broken(monkeypatch)
    with pytest.raises(Exception, match=rf"(?s)RewriteCheckError.*spellings\.py:.*{where}"):
        run_rewritten(Step(s), *inputs(s), dynamic=dynamic, check=True)


def test_a_difference_below_float32_rounding_is_caught(monkeypatch):
    looser_epsilon(monkeypatch)
    with pytest.raises(Exception, match=r"RewriteCheckError.*output of token 0 by \d(\.\d)?e-0[67]"):
        run_rewritten(EPSILON, *make_inputs(), check=True)


def test_without_the_check_the_broken_rewrite_goes_unseen(monkeypatch):
    one_token_further(monkeypatch)
    assert run_rewritten(Step(Spelling(T=2)), *inputs(Spelling(T=2)))[1].report.matched == 1


@pytest.mark.parametrize("checkpoint", ["functional", "buffer"])
def test_a_broken_selected_state_is_caught(checkpoint, monkeypatch):
    s = Spelling(checkpoint=checkpoint)
    one_token_further(monkeypatch)
    what = "selected state" if checkpoint == "functional" else "pool"
    with pytest.raises(Exception, match=f"RewriteCheckError.*{what} by"):
        run_rewritten(Step(s), *inputs(s), check=True)


# --- what a user of it relies on ----------------------------------------------------------------------------------------


def test_inputs_that_are_computed_twice_are_one_value(caplog):
    """Correction and update each normalise the key: the check must not take the two for independent values."""

    def step(S, q, k, v, g, beta):
        S = S * g.exp().unsqueeze(-2)
        u = beta.unsqueeze(-1) * (v - (S * (k * 1.5).unsqueeze(-2)).sum(-1))
        return S + u.unsqueeze(-1) * (k * 1.5).unsqueeze(-2), (S * 0).sum(-1)

    def with_output(S, q, k, v, g, beta):
        S, _ = step(S, q, k, v, g, beta)
        return S, (S * q.unsqueeze(-2)).sum(-1)

    def slots_computed_twice(pool, slots, *rest):
        return layer(with_output)(pool, slots * 1, *rest)

    with caplog.at_level("DEBUG", "compile_passes"):
        _, seen = run_rewritten(slots_computed_twice, *make_inputs(), check=True)
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
    one_token_further(monkeypatch)

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
    def noting(self, values):
        used.extend(x.shape for x in values.values() if isinstance(x, torch.Tensor) and x.ndim == 4)
        return run(self, values)

    return noting


def test_original_that_does_not_run_by_itself_is_a_warning(monkeypatch, caplog):
    def fails(self, values):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(check.Piece, "run", fails)
    seen, messages = rewrite_checked(Spelling(T=2), caplog)
    assert seen.report.matched == 1
    assert any("could not check the rewrite" in m and "no kernel" in m for m in messages)


def test_b26_uuid_tells_a_checked_graph_from_an_unchecked_one():
    assert RecoverSSMPass(check=True).uuid() != RecoverSSMPass().uuid()


def test_context_takes_the_option(monkeypatch):
    one_token_further(monkeypatch)
    s = Spelling(T=2)
    with torch.no_grad(), recoverssm_passes(check=True), pytest.raises(Exception, match="RewriteCheckError"):
        torch.compile(Step(s))(*inputs(s))
    assert issubclass(RewriteCheckError, RuntimeError)
    torch._dynamo.reset()
    args, expected = copied(inputs(s)), inputs(s)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(Step(s))(*args), Step(s)(*expected))

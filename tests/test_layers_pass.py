"""The pass merges the commits of layers that are alike, and of no others."""

import re
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline
from rewriting import calls, run_rewritten
from spellings import Spelling, Step, inputs
from test_pass_graphs import compact
from torch._dynamo.utils import ReinplaceCounters
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node

from compile_passes import RecoverSSMPass
from compile_passes.backend import recoverssm
from compile_passes.recover_pass import check_views
from compile_passes.replacing.merge_commits import merge_commits
from recoverssm_ops import layers_ops, ops

FORMS = {"auto_functionalized_v2": auto_functionalized_v2, "auto_functionalized": auto_functionalized}


def commits(graph: Graph) -> tuple[list[Node], list[Node]]:
    """Commits of one layer, and commits of several."""
    nodes = [node for form in FORMS.values() for node in calls(graph, form)]
    return tuple([n for n in nodes if n.args[0] is op] for op in (ops.kda_commit, layers_ops.kda_commit_layers))


def layers_of(node: Node) -> int:
    return len(node.kwargs["u"])


def check_step(step, args, expected_args, eager, **settings) -> Graph:
    """The rewritten step gives what the eager one gives, in outputs and pools."""
    result, seen = run_rewritten(step, *args, merge_layers=True, **settings)
    torch.testing.assert_close(result, eager(*expected_args))
    for x, y in zip(args[0], expected_args[0], strict=True):
        torch.testing.assert_close(x, y)
    assert seen.report.refused == 0
    seen.graph.lint()
    check_views(seen.graph)
    return seen.graph


def test_graph_of_three_layers():
    s = Spelling(T=2, layers=3)
    graph = check_step(Step(s), inputs(s), inputs(s), Step(s))
    assert_expected_inline(
        "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in compact(graph).splitlines()),
        """\
%0 lt(input1)
%1 add(input1)
%2 where(%0, %1, input1)
%3 kda_verify(input3, input4, input2, input5, input6, input0, %2, input7, input8)
%4 getitem(%3)
%5 getitem(%3)
%6 sub(input9)
%7 remainder(%6)
%8 add(%7)
%9 unsqueeze(%2)
%10 unsqueeze(%8)
%11 kda_verify(input11, input12, %4, input13, input14, input10, %2, input15, input16)
%12 getitem(%11)
%13 getitem(%11)
%14 kda_verify(input18, input19, %12, input20, input21, input17, %2, input22, input23)
%15 getitem(%14)
%16 getitem(%14)
%17 reshape(%15)
%18 reshape(%17)
%19 auto_functionalized_v2(%5, %13, %16, input4, input12, input19, input5, input13, input20, input7, input15,
    input22, input8, input16, input23, %2, %9, %10, input0, input10, input17)
%20 getitem(%19)
%21 getitem(%19)
%22 getitem(%19)
%23 copy_(input0, %20)
%24 copy_(input10, %21)
%25 copy_(input17, %22)
return %18""",
    )


@pytest.mark.parametrize("shapes", ["static", "batch_dynamic", "all_dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_graph(form, shapes):
    s = Spelling(T=2, layers=3, shapes=shapes)
    dynamic = {"static": False, "batch_dynamic": None, "all_dynamic": True}[shapes]
    with config.patch(enable_auto_functionalized_v2=form == "auto_functionalized_v2"):
        graph = check_step(Step(s), inputs(s), inputs(s), Step(s), dynamic=dynamic)
    single, (merged,) = commits(graph)
    assert not single and merged.target is FORMS[form] and layers_of(merged) == 3


@pytest.mark.parametrize("kind", ["buffer", "scalar gate", "no gate"])
def test_every_kind_of_record(kind):
    changed = {
        "buffer": {"checkpoint": "buffer"},
        "scalar gate": {"gate": "scalar"},
        "no gate": {"gate": "precomputed"},
    }
    s = Spelling(T=2, layers=2, **changed[kind])
    graph = check_step(Step(s), inputs(s), inputs(s), Step(s))
    single, (merged,) = commits(graph)
    assert not single and layers_of(merged) == 2
    assert len(merged.kwargs["A_log"]) == (0 if kind == "no gate" else 2)


def test_one_layer_is_left_as_it_is():
    s = Spelling(T=2)
    single, merged = commits(check_step(Step(s), inputs(s), inputs(s), Step(s)))
    assert len(single) == 1 and not merged


class Mixed(torch.nn.Module):
    """Two steps of several layers each, in one graph; the arguments of both are lists one after the other."""

    def __init__(self, *spellings: Spelling, between=None):
        super().__init__()
        self.steps = torch.nn.ModuleList(Step(s) for s in spellings)
        self.between = between

    def forward(self, states, *rest):
        results, start = [], 0
        for i, step in enumerate(self.steps):
            layers, slots, n = rest[3 * i : 3 * i + 3]
            results.append(step(states[start : start + len(layers)], layers, slots, n))
            start += len(layers)
            if self.between is not None:
                results.append(self.between(states))
        return results


def mixed_inputs(*spellings: Spelling, shared_plan: bool = True) -> tuple:
    states, rest = [], []
    for i, s in enumerate(spellings):
        own, layers, slots, n = inputs(s, seed=i)
        states += own
        rest += [layers, *(rest[1:3] if rest and shared_plan else (slots, n))]
    return states, *rest


DIFFERENT = {
    "head size": (Spelling(T=2, layers=2), Spelling(T=2, layers=2, K=4)),
    "window": (Spelling(T=2, layers=2), Spelling(T=3, layers=2)),
    "gate": (Spelling(T=2, layers=2), Spelling(T=2, layers=2, gate="unbounded")),
    "bound": (Spelling(T=2, layers=2), Spelling(T=2, layers=2, lower_bound=-4.0)),
    "pool dtype": (Spelling(T=2, layers=2), Spelling(T=2, layers=2, pool_dtype=torch.float16)),
    "normalisation": (Spelling(T=2, layers=2), Spelling(T=2, layers=2, l2norm="none")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_stay_apart(name):
    """Each kind is merged for itself."""
    spellings = DIFFERENT[name]
    arguments = [mixed_inputs(*spellings) for _ in range(2)]
    for args in arguments:
        args[3].clamp_(max=2)
    graph = check_step(Mixed(*spellings), *arguments, Mixed(*spellings))
    single, merged = commits(graph)
    assert not single and [layers_of(node) for node in merged] == [2, 2]


def test_layers_of_other_plans_stay_apart():
    spellings = (Spelling(T=2, layers=2), Spelling(T=2, layers=1))
    arguments = [mixed_inputs(*spellings, shared_plan=False) for _ in range(2)]
    single, merged = commits(check_step(Mixed(*spellings), *arguments, Mixed(*spellings)))
    assert len(single) == 1 and [layers_of(node) for node in merged] == [2]


def test_a_pool_of_other_strides_stays_apart():
    s = Spelling(T=2, layers=3)
    arguments = [inputs(s) for _ in range(2)]
    for states, *_ in arguments:
        wide = states[1].new_zeros(*states[1].shape[:-1], 16)
        wide[..., : s.K] = states[1]
        states[1] = wide[..., : s.K]
    graph = check_step(Step(s), *arguments, Step(s))
    (single,), (merged,) = commits(graph)
    assert layers_of(merged) == 2
    (pool,) = single.kwargs["_all_bases"]
    assert pool.meta["val"].stride()[-2] == 16


def test_a_pool_read_in_between_is_committed_in_time():
    """What reads a committed pool stays behind the commit, what is committed later is merged."""
    spellings = (Spelling(T=2, layers=2), Spelling(T=2, layers=2))

    def between(states):
        return states[0].sum(-1)

    arguments = [mixed_inputs(*spellings) for _ in range(2)]
    model = Mixed(*spellings, between=between)
    graph = check_step(model, *arguments, Mixed(*spellings, between=between))
    single, merged = commits(graph)
    assert sum(map(layers_of, merged)) + len(single) == 4 and merged
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in single + merged:
        assert all(place[reader] > place[node] for result in node.users for reader in result.users)


def test_a_pool_committed_twice_is_committed_in_order():
    """Two windows one after the other on the same pools: the second verifies what the first committed."""
    s = Spelling(T=2, layers=2)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.step = Step(s)

        def forward(self, states, layers, slots, n):
            return self.step(states, layers, slots, n), self.step(states, layers, slots, n)

    graph = check_step(Twice(), inputs(s), inputs(s), Twice())
    _, merged = commits(graph)
    assert [layers_of(node) for node in merged] == [2, 2]
    first, second = merged
    assert {n.args[0] for n in second.kwargs["_all_bases"]} == {first}


@pytest.mark.parametrize("form", FORMS)
def test_b23_compiled_code_copies_no_pool(form):
    """One compilation by Inductor, with C++ and all."""
    s = Spelling(T=2, layers=3)
    args, expected = inputs(s), inputs(s)
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    options = {"enable_auto_functionalized_v2": form == "auto_functionalized_v2", "fx_graph_cache": False}
    with torch.no_grad(), config.patch(options), torch._functorch.config.patch(enable_autograd_cache=False):
        merging = {"post_grad_custom_pre_pass": RecoverSSMPass(merge_layers=True)}
        compiled = torch.compile(Step(s), options=merging, dynamic=False)
        result, (code,) = run_and_get_code(compiled, *args)
        torch.testing.assert_close(result, Step(s)(*expected))
    for x, y in zip(args[0], expected[0], strict=True):
        torch.testing.assert_close(x, y)
    assert (ReinplaceCounters.get_total_missed(), ReinplaceCounters.get_total_missed_bytes()) == (0, 0)
    assert code.count("torch.ops.recoverssm.kda_commit_layers.default(") == 1 and "kda_commit.default(" not in code
    assert "clone" not in code and "index_put" not in code
    slots = args[0][0].shape[0]
    assert not re.findall(rf"empty_strided\w*\(\({slots}, ", code)


def test_by_default_commits_are_merged_where_pools_are_on_cuda():
    s = Spelling(T=2, layers=2)
    _, seen = run_rewritten(Step(s), *inputs(s), merge_layers=None)
    single, merged = commits(seen.graph)
    assert len(single) == 2 and not merged
    assert merge_commits(seen.graph, "cuda") == 0 and merge_commits(seen.graph, "cpu") == 2
    single, merged = commits(seen.graph)
    assert not single and len(merged) == 1


def test_symbolic_view_of_a_pool_is_refused():
    """As for the commit of one layer: Inductor would write it at offset 0 (pytorch/pytorch#198068)."""
    pool, rows = torch.randn(3, 4, 2, 6, 8), torch.tensor([1, 2])
    u, k, g = torch.randn(2, 2, 2, 6), torch.randn(2, 2, 2, 8), -torch.rand(2, 2, 2, 8)

    def commit(pool, u, k, g, rows):
        layers = [pool[layer] for layer in range(3)]
        plan = (rows, rows[:, None], torch.ones_like(rows)[:, None])
        settings = (None, 2, [], [], 0.0, False, False, -1)
        layers_ops.kda_commit_layers(layers, [u] * 3, [k] * 3, [g] * 3, *plan, *settings)

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"kda_commit_layers into a view.*symbolic storage offset"):
        torch.compile(commit, backend=recoverssm, dynamic=True)(pool, u, k, g, rows)
    torch._dynamo.reset()
    before = pool.clone()
    with torch.no_grad():
        torch.compile(commit, backend=recoverssm, dynamic=False)(pool, u, k, g, rows)
        commit(before, u, k, g, rows)
    torch.testing.assert_close(pool, before)

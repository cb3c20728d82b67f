"""What the graph looks like after the pass, and the code that Inductor makes of it."""

import math
import operator
import re

import pytest
import torch
from expecttest import assert_expected_inline
from rewriting import calls, run_rewritten, verify_calls
from spellings import Spelling, Step, inputs
from torch._dynamo.utils import ReinplaceCounters
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, Node

import recoverssm_ops.ops as ops

aten = torch.ops.aten
STATE = 3 * 2 * 6 * 8  # B H V K


def compact(graph: Graph) -> str:
    """One line a node: its operator and the operators of its node arguments."""
    names: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = f"input{len(names)}"
        elif node.op == "output":
            lines.append(f"return {', '.join(names[n] for n in node.all_input_nodes)}")
        else:
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            names[node] = f"%{len(lines)}"
            lines.append(f"%{len(lines)} {name}({', '.join(names[n] for n in node.all_input_nodes)})")
    return "\n".join(lines)


def rewritten(s: Spelling, functionalization_v2: bool = True) -> Graph:
    dynamic = {"static": False, "batch_dynamic": None, "all_dynamic": True}[s.shapes]
    with config.patch(enable_auto_functionalized_v2=functionalization_v2):
        _, seen = run_rewritten(Step(s), *inputs(s), dynamic=dynamic)
    assert seen.report.refused == 0
    return seen.graph


def test_graph_with_a_pool_mul():
    assert_expected_inline(
        compact(rewritten(Spelling(T=2, contraction="mul"))),
        """\
%0 lt(input1)
%1 add(input1)
%2 where(%0, %1, input1)
%3 kda_verify(input3, input4, input2, input5, input6, input0, %2, input7, input8)
%4 getitem(%3)
%5 getitem(%3)
%6 reshape(%4)
%7 sub(input9)
%8 reshape(%6)
%9 remainder(%7)
%10 add(%9)
%11 unsqueeze(%2)
%12 unsqueeze(%10)
%13 auto_functionalized_v2(%5, input4, input5, %2, %11, %12, input7, input8, input0)
%14 getitem(%13)
%15 copy_(input0, %14)
return %8""",
    )


def test_graph_with_a_pool_einsum():
    assert_expected_inline(
        compact(rewritten(Spelling(T=2, contraction="einsum"))),
        """\
%0 lt(input1)
%1 add(input1)
%2 where(%0, %1, input1)
%3 kda_verify(input3, input4, input2, input5, input6, input0, %2, input7, input8)
%4 getitem(%3)
%5 getitem(%3)
%6 reshape(%4)
%7 sub(input9)
%8 reshape(%6)
%9 remainder(%7)
%10 add(%9)
%11 unsqueeze(%2)
%12 unsqueeze(%10)
%13 auto_functionalized_v2(%5, input4, input5, %2, %11, %12, input7, input8, input0)
%14 getitem(%13)
%15 copy_(input0, %14)
return %8""",
    )


def test_graph_with_a_pool_matmul():
    assert_expected_inline(
        compact(rewritten(Spelling(T=2, contraction="matmul"))),
        """\
%0 lt(input1)
%1 add(input1)
%2 where(%0, %1, input1)
%3 kda_verify(input3, input4, input2, input5, input6, input0, %2, input7, input8)
%4 getitem(%3)
%5 getitem(%3)
%6 reshape(%4)
%7 sub(input9)
%8 reshape(%6)
%9 remainder(%7)
%10 add(%9)
%11 unsqueeze(%2)
%12 unsqueeze(%10)
%13 auto_functionalized_v2(%5, input4, input5, %2, %11, %12, input7, input8, input0)
%14 getitem(%13)
%15 copy_(input0, %14)
return %8""",
    )


def test_graph_with_a_functional_state_mul():
    assert_expected_inline(
        compact(rewritten(Spelling(T=2, contraction="mul", checkpoint="functional"))),
        """\
%0 kda_verify(input2, input3, input1, input4, input5, input0, input6, input7)
%1 getitem(%0)
%2 getitem(%0)
%3 reshape(%1)
%4 sub(input8)
%5 remainder(%4)
%6 add(%5)
%7 kda_recover(input0, %2, input3, input4, %6, input6, input7)
%8 reshape(%3)
return %8, %7""",
    )


def test_graph_with_a_whole_buffer_and_nothing_to_fold():
    s = Spelling(T=2, checkpoint="buffer", gate="precomputed", l2norm="none", beta="raw")
    assert_expected_inline(
        compact(rewritten(s)),
        """\
%0 kda_verify(input2, input3, input1, input4, input5, input0)
%1 getitem(%0)
%2 getitem(%0)
%3 reshape(%1)
%4 sub(input8)
%5 remainder(%4)
%6 add(%5)
%7 iota()
%8 unsqueeze(%7)
%9 unsqueeze(%6)
%10 auto_functionalized_v2(%2, input3, input4, %7, %8, %9, input0)
%11 getitem(%10)
%12 reshape(%3)
%13 copy_(input0, %11)
return %12""",
    )


SHAPES = ("static", "batch_dynamic", "all_dynamic")


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("checkpoint", ["pool", "buffer", "functional"])
def test_b23_no_state_is_left_but_the_checkpoint(checkpoint, shapes):
    graph = rewritten(Spelling(T=4, checkpoint=checkpoint, shapes=shapes, layers=2))
    large = {n for n in graph.nodes if _elements(n) >= STATE and n.op != "placeholder"}
    if checkpoint == "functional":
        assert large == set(calls(graph, ops.kda_recover))
    else:
        # What a commit gives back is the pool itself, and what copy_ returns is its first argument.
        pools = {n for n in calls(graph, operator.getitem) if n.args[0].target is auto_functionalized_v2}
        assert len(pools) == 2 and large == pools | set(calls(graph, aten.copy_.default))
    assert not calls(graph, aten.index_put.default)


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(n if isinstance(n, int) else n.node.hint for n in value.shape)


@pytest.mark.parametrize("version", [1, 2])
def test_commit_in_the_functional_form_of_the_host(version):
    graph = rewritten(Spelling(T=2), functionalization_v2=version == 2)
    used, other = auto_functionalized, auto_functionalized_v2
    if version == 2:
        used, other = other, used
    (commit,) = calls(graph, used)
    assert commit.args == (ops.kda_commit,) and not calls(graph, other) and not calls(graph, ops.kda_commit)
    (pool,) = [n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].shape == (5, 2, 6, 8)]
    assert pool in commit.all_input_nodes


@pytest.mark.parametrize("shapes", SHAPES)
def test_b30_inserted_nodes_carry_what_inductor_needs(shapes):
    """Without ``eager_input_vals`` Inductor would not keep the strides that the operators were traced with."""
    for checkpoint in ("pool", "functional"):
        graph = rewritten(Spelling(T=2, checkpoint=checkpoint, shapes=shapes))
        inserted = [
            n for target in (ops.kda_verify, ops.kda_recover, auto_functionalized_v2) for n in calls(graph, target)
        ]
        assert len(inserted) == 2
        for node in inserted:
            args, kwargs = node.meta["eager_input_vals"]
            assert len(args) == len(node.args) and kwargs.keys() == node.kwargs.keys()
            given = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    assert any(value.shape == x.shape and value.stride() == x.stride() for x in given)
        for node in graph.nodes:
            assert node.op == "output" or "val" in node.meta, node


def test_graph_is_sorted_and_sound():
    graph = rewritten(Spelling(T=3, layers=3, preprocessing="step"))
    graph.lint()
    seen = set()
    for node in graph.nodes:
        assert set(node.all_input_nodes) <= seen
        seen.add(node)
    # Dead code is gone: every node is used.
    assert all(n.users for n in graph.nodes if n.op == "call_function" and n.target is not aten.copy_.default)


def test_raw_inputs_reach_the_operators_unconverted():
    """Folding is for reading half-precision inputs instead of float32 copies of them."""
    s = Spelling(T=2, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
    graph = rewritten(s)
    (call,) = verify_calls(graph)
    for name in ("q", "k", "g", "beta", "state"):
        assert call[name].op == "placeholder" and call[name].meta["val"].dtype == torch.bfloat16, name
    (commit,) = calls(graph, auto_functionalized_v2)
    assert commit.kwargs["k"] is call["k"] and commit.kwargs["g"] is call["g"]


@pytest.mark.parametrize("version", [1, 2])
def test_b23_compiled_code_allocates_no_state(version):
    """One compilation by Inductor, with C++ and all."""
    from compile_passes.backend import recoverssm

    s = Spelling(T=4)
    args, expected = inputs(s), inputs(s)
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    options = {"enable_auto_functionalized_v2": version == 2, "fx_graph_cache": False}
    with torch.no_grad(), config.patch(options), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(Step(s), backend=recoverssm, dynamic=False)
        result, (code,) = run_and_get_code(compiled, *args)
        torch.testing.assert_close(result, Step(s)(*expected))
    torch.testing.assert_close(args[0], expected[0])
    assert (ReinplaceCounters.get_total_missed(), ReinplaceCounters.get_total_missed_bytes()) == (0, 0)
    assert "recoverssm.kda_commit" in code and "recoverssm.kda_verify" in code
    assert "clone" not in code and "index_put" not in code
    allocated = [
        math.prod(int(n) for n in re.findall(r"\d+", sizes))
        for sizes in re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    ]
    assert allocated and max(allocated) < STATE

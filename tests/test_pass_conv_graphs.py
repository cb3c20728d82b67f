"""Replaced convolutions in whole graphs: the generic model, the options of the pass, the forms and metadata of the graph."""

import re
from pathlib import Path

import pytest
import torch
from conv_layers import layer, make_inputs
from expecttest import assert_expected_inline
from rewriting import calls, compile_rewritten, copied, run_rewritten
from test_pass_conv import FUNCTIONAL, commits
from test_pass_graphs import compact
from test_pass_model import guessing, speculative_step
from torch._dynamo.utils import ReinplaceCounters
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config

import recoverssm_ops.conv_ops as ops
from compile_passes import RecoverSSMPass, Report, RewriteCheckError, explain, export_step, recoverssm_passes, rewrite
from compile_passes.convolutions import replace
from compile_passes.convolutions.reasons import CONVOLUTION_REASONS
from compile_passes.exporting import graph as exporting
from compile_passes.install import SLOT
from models.decode import decode, example_inputs
from recoverssm_ops import layers_ops

aten = torch.ops.aten


def two_layers(pools, slots, xs, weight, bias, n):
    return [layer()(pool, slots, x, weight, bias, n) for pool, x in zip(pools, xs, strict=True)]


def inputs_of_two():
    pool, slots, x, *rest = make_inputs()
    return [pool, pool * 2], slots, [x, x + 1], *rest


# --- the generic model --------------------------------------------------------------------------------------------------


def test_every_convolution_of_the_model_is_replaced():
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(speculative_step(), convolutions=True)
    with torch.no_grad():
        compiled(*example_inputs(3, 2, 256, "cpu"))
    report, graph = seen.report, seen.graph
    assert (report.matched, report.refused, report.convolutions_replaced, report.convolutions_left) == (3, 0, 3, 0)
    verifies = calls(graph, ops.causal_conv1d_verify)
    assert len(verifies) == len(commits(graph)) == 3 and not calls(graph, aten.convolution.default)
    # Slots and counts are computed once, whatever commits by them.
    slots = {node.args[4] for node in verifies} | {node.kwargs["source"] for node in commits(graph)}
    assert len(slots) == 1 and len({node.kwargs["length"] for node in commits(graph)}) == 1
    assert_metadata_is_true(graph)


def assert_metadata_is_true(graph):
    """Every node computed again from its inputs' metadata has the strides that its own metadata promise."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target in (*FUNCTIONAL, aten.copy_.default):
            continue
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            with value.fake_mode:
                assert node.target(*args, **kwargs).stride() == value.stride(), node


@pytest.mark.parametrize("pattern", [[0, 1, 2, 3, 0, 2]], ids=str)
def test_speculative_text_equals_plain_text(pattern):
    step = speculative_step(0, slots=1)
    prompt = b"states of linear attention"
    plain = decode(step, step.pools, [prompt], num_tokens=14, num_drafts=0)
    histories = {name: x.clone() for name, x in step.pools.named_buffers() if name.startswith("conv")}
    (right,) = plain.continuations
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(step, convolutions=True)
    drafter = guessing(right, prompt, pattern)
    speculative = decode(compiled, step.pools, [prompt], num_tokens=14, num_drafts=3, drafter=drafter)
    assert seen.report.convolutions_replaced == seen.report.matched == 3
    assert speculative.continuations == plain.continuations
    for name, history in histories.items():
        torch.testing.assert_close(step.pools.get_buffer(name), history, rtol=1e-4, atol=1e-5)


# --- the graph ----------------------------------------------------------------------------------------------------------


def test_graph():
    _, seen = run_rewritten(layer(), *make_inputs(), dynamic=False, convolutions=True)
    assert_expected_inline(
        compact(seen.graph),
        """\
%0 unsqueeze(input3)
%1 select(%0)
%2 lt(input1)
%3 add(input1)
%4 where(%2, %3, input1)
%5 causal_conv1d_verify(input2, %1, input4, input0, %4)
%6 permute(%5)
%7 permute(%6)
%8 add(input5)
%9 remainder(%8)
%10 unsqueeze(%4)
%11 unsqueeze(%9)
%12 auto_functionalized_v2(input2, %4, %10, %11, input0)
%13 getitem(%12)
%14 copy_(input0, %13)
return %7""",
    )


@pytest.mark.parametrize("version", [1, 2])
def test_commits_are_merged(version):
    args, expected = inputs_of_two(), inputs_of_two()
    with config.patch(enable_auto_functionalized_v2=version == 2):
        result, seen = run_rewritten(two_layers, *args, dynamic=False, convolutions=True, merge_layers=True)
    torch.testing.assert_close((result, args[0]), (two_layers(*expected), expected[0]))
    (merged,) = calls(seen.graph, (auto_functionalized, auto_functionalized_v2)[version - 1])
    assert merged.args == (layers_ops.causal_conv1d_commit_layers,) and len(merged.kwargs["xs"]) == 2


def test_b23_compiled_code_updates_the_pool_in_place():
    """One compilation by Inductor, with C++ and all."""
    args, expected = make_inputs(), make_inputs()
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    options = {SLOT: RecoverSSMPass(convolutions=True), "fx_graph_cache": False}
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        result, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(layer(), options=options), *args)
    torch.testing.assert_close((result, args[0]), (layer()(*expected), expected[0]))
    assert (ReinplaceCounters.get_total_missed(), ReinplaceCounters.get_total_missed_bytes()) == (0, 0)
    assert "causal_conv1d_verify" in code and "causal_conv1d_commit" in code
    assert not re.search(r"clone|index_put|convolution", code)


def test_exported_halves(monkeypatch):
    """As on CUDA: what crosses to the commit half is the window's inputs, not the joined sequence."""
    monkeypatch.setattr(exporting, "rewrite", lambda graph, convolutions: rewrite(graph, convolutions=True))
    step = speculative_step(num_layers=1, full_attn_period=0)
    for pool in step.pools.buffers():
        pool.normal_(generator=torch.Generator().manual_seed(1))
    args, expected = example_inputs(3, 2, 256, "cpu"), copied(step)
    exported = export_step(step, args)
    assert exported.report.convolutions_replaced == 1 and exported.manifest.uncut is None
    with torch.no_grad():
        tokens, num_accepted = expected(*args)
        result = exported.step.module()
        torch.testing.assert_close(result(*args), (tokens, num_accepted))
    for name, pool in result.named_buffers():
        torch.testing.assert_close(pool, expected.get_buffer(name))
    conv = [port for port in exported.emitted["verify"].outputs if port.role == "record" and port.shape[-1] == 44]
    assert [port.shape for port in conv] == [(3, 3, 44)]


# --- options ------------------------------------------------------------------------------------------------------------


def test_default_leaves_them_to_the_compiler_on_the_cpu():
    _, seen = run_rewritten(layer(), *make_inputs(), dynamic=False)
    assert [c.reason for c in seen.report.convolutions] == ["on_cpu"] and seen.untouched


def test_switched_off():
    _, seen = run_rewritten(layer(), *make_inputs(), dynamic=False, convolutions=False)
    assert seen.report.convolutions == [] and seen.untouched


def test_b26_uuid_tells_the_options_apart():
    assert len({RecoverSSMPass(convolutions=c).uuid() for c in (None, False, True)}) == 3


def test_context_takes_the_option():
    with recoverssm_passes(convolutions=True) as added:
        assert added.convolutions is True


def wrong_counts(original):
    return lambda *args: original(*args) - 1


def wrong_activation(original):
    def verify(self, graph):
        self.convolution.silu = False
        return original(self, graph)

    return verify


@pytest.mark.parametrize(("owner", "name", "broken", "what"), [
    (replace, "_accepted", wrong_counts, "pool by"),
    (replace.ConvolutionReplacement, "_verify", wrong_activation, "output by"),
])  # fmt: skip
def test_check_catches_a_broken_rewrite(owner, name, broken, what, monkeypatch):
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    with pytest.raises(Exception, match=rf"(?s)RewriteCheckError.*short convolution.*{what}"):
        run_rewritten(layer(), *make_inputs(), dynamic=False, convolutions=True, check=True)
    assert issubclass(RewriteCheckError, RuntimeError)


def test_check_passes_what_is_right(caplog):
    args, expected = make_inputs(), make_inputs()
    with caplog.at_level("DEBUG", "compile_passes"):
        result, seen = run_rewritten(layer(), *args, dynamic=False, convolutions=True, check=True)
    assert seen.report.convolutions_replaced == 1 and "checked the rewrite of short convolution" in caplog.text
    torch.testing.assert_close((result, args[0]), (layer()(*expected), expected[0]))


# --- what a user sees ---------------------------------------------------------------------------------------------------


def test_explain_says_what_would_be_replaced_and_writes_nothing():
    args = make_inputs()
    before = copied(args)
    report = explain(layer(), *args)
    text = str(report)
    assert "short convolutions: 0 replaced, 1 left to the compiler" in text
    assert f"on_cpu: {CONVOLUTION_REASONS['on_cpu']}" in text and "conv_layers.py" in text
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_table_of_reasons_is_complete():
    text = (Path(__file__).parents[1] / "docs" / "pass.md").read_text(encoding="utf-8")
    rows = [f"| `{reason}` | {found} |" for reason, found in CONVOLUTION_REASONS.items()]
    assert "\n".join(["| reason | what was found; what to do |", "|---|---|", *rows]) in text


def test_counts_of_layers_do_not_change():
    _, seen = run_rewritten(layer(), *make_inputs(), dynamic=False, convolutions=True)
    report = Report.joined([seen.report, seen.report])
    assert (report.matched, report.refused, report.convolutions_replaced) == (0, 0, 2)
    assert "short convolutions: 2 replaced, 0 left to the compiler" in str(report)


def test_log_has_a_line_for_each(caplog):
    with caplog.at_level("INFO", "compile_passes"):
        run_rewritten(layer(), *make_inputs(), dynamic=False, convolutions=True)
        run_rewritten(layer(), *make_inputs(), dynamic=False)
    messages = [record.getMessage() for record in caplog.records if record.name == "compile_passes"]
    assert [message.partition(" of ")[0] for message in messages] == [
        "replaced the short convolution",
        "left the short convolution",
    ]

"""A step of several layers with one commit of each kind, compiled and exported: no pool is cloned, nothing recompiles."""

import re

import pytest
import torch
from layers_cases import LAYERS, SLOTS, assert_same, make_conv_layers, make_layers
from pools import same_bits
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import recoverssm_ops as rs


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


SIZES = {"heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 12}
GATE = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0}


def step(pools, convs, inputs, parameters, slots, n, cu_seqlens=None, together=True):
    """Layer after layer: each window depends on the outputs of the one before, by sums alone (they are exact
    however they are compiled); then the commits."""
    outputs, records, xs = 0.0, [], []
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": 4}
    for pool, conv, (q, k, v, g, beta, x), (A_log, dt_bias, weight) in zip(
        pools, convs, inputs, parameters, strict=True
    ):
        x = x + outputs
        y = rs.causal_conv1d_verify(x, weight, None, conv, slots, **packed)
        o, record = rs.kda_verify(
            q, k, v + y[..., None, :12], g, beta, pool, slots, A_log=A_log, dt_bias=dt_bias, **GATE, **packed
        )
        outputs = o[..., 0, :1]
        records.append(record)
        xs.append(x)
    plan = rs.CommitPlan.in_place(n, slots)
    if together:
        rs.causal_conv1d_commit_layers(convs, xs, None, plan=plan, cu_seqlens=cu_seqlens)
        rs.kda_commit_layers(pools, records, None, plan=plan)
    else:
        for pool, conv, record, x in zip(pools, convs, records, xs, strict=True):
            rs.causal_conv1d_commit(conv, x, None, plan=plan, cu_seqlens=cu_seqlens)
            rs.kda_commit(pool, record, None, plan=plan)
    return outputs


def make_pools(device):
    pools, _ = make_layers(device, guard=0, sizes=SIZES)
    convs, _, _ = make_conv_layers(device, guard=0)
    return pools, convs


def states(pools):
    return [pool.state for pool in pools]


def make_arguments(device, batch=3, lengths=None):
    _, windows = make_layers(device, batch=batch, sizes=SIZES, lengths=lengths)
    _, xs, cu_seqlens = make_conv_layers(device, batch=batch, lengths=lengths)
    weight = torch.randn(40, 4, generator=torch.Generator().manual_seed(9)).to(device)
    inputs = [(*window.inputs, x) for window, x in zip(windows, xs, strict=True)]
    parameters = [(window.options["A_log"], window.options["dt_bias"], weight) for window in windows]
    slots = torch.arange(batch, device=device) * 2 + 1
    n = torch.arange(batch, device=device) % 5
    return inputs, parameters, slots, n, *(() if cu_seqlens is None else (cu_seqlens,))


def check_equal(compiled, device, arguments) -> None:
    """Outputs and pools have the bits of the eager loop over the layers, and every pool has changed."""
    (pools, convs), (loop_pools, loop_convs) = make_pools(device), make_pools(device)
    o = compiled(states(pools), states(convs), *arguments)
    assert same_bits(o, step(states(loop_pools), states(loop_convs), *arguments, together=False))
    assert_same(pools, loop_pools)
    assert_same(convs, loop_convs)
    for pool in pools + convs:
        if arguments[3].any():
            assert not same_bits(pool.storage, pool.before)


@pytest.mark.parametrize("v2", [True, False], ids=["auto_functionalized_v2", "auto_functionalized"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_b23_no_pool_is_copied(device, dynamic, v2):
    codes = []

    def compiled(*arguments):
        o, code = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=dynamic), *arguments)
        codes.extend(code)
        return o

    with config.patch(enable_auto_functionalized_v2=v2):
        check_equal(compiled, device, make_arguments(device))
    assert ReinplaceCounters.get_total_missed() == 0 and ReinplaceCounters.get_total_missed_bytes() == 0
    text = "\n".join(codes)
    shapes = re.findall(r"= empty_strided\w*\(\((.*?)\)", text)
    assert not [shape for shape in shapes if shape.startswith(f"{SLOTS},")]
    for copy in ("aten.clone", "aten.copy_", "aten.index_put", "aten.slice_scatter"):
        assert copy not in text
    for name in ("kda_commit_layers.default(", "causal_conv1d_commit_layers.default("):
        assert text.count(f"torch.ops.recoverssm.{name}") == 1


def test_b25_acceptance_never_recompiles(device):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs, parameters, slots, _ = make_arguments(device)
    for accepted in ([0, 0, 0], [4, 4, 4], [1, 2, 3], [9, -1, 0]):
        check_equal(compiled, device, (inputs, parameters, slots, torch.tensor(accepted, device=device)))
    assert graphs_of(step) == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_b25_batch_sizes_need_two_graphs(device, dynamic):
    """One for a single row, one for all others."""
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (1, 2, 3, 5, 8, 3, 1):
        check_equal(compiled, device, make_arguments(device, batch))
    assert graphs_of(step) == 2


def test_b25_packed_rows_and_tokens_need_one_graph(device):
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    # The first sizes are all different: equal ones would be taken for one symbol.
    for lengths in ([4, 0, 0, 4, 1], [4, 1, 4], [2, 2], [0, 3, 3]):
        check_equal(compiled, device, make_arguments(device, len(lengths), lengths))
    assert graphs_of(step) == 1


def graphs_of(function) -> int:
    return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(function))


class Step(torch.nn.Module):
    """The step on pools that are buffers, one a layer."""

    def __init__(self, pools, convs):
        super().__init__()
        for layer, (pool, conv) in enumerate(zip(pools, convs, strict=True)):
            self.register_buffer(f"pool_{layer}", pool)
            self.register_buffer(f"conv_{layer}", conv)

    def forward(self, inputs, parameters, slots, num_accepted):
        pools, convs = ([getattr(self, f"{kind}_{layer}") for layer in range(LAYERS)] for kind in ("pool", "conv"))
        return step(pools, convs, inputs, parameters, slots, num_accepted)


@pytest.mark.parametrize("decomposed", [False, True], ids=["training IR", "functional"])
def test_exported_step_with_dynamic_batch(device, decomposed, tmp_path):
    batch = torch.export.Dim("batch", min=1, max=8)
    pools, convs = make_pools(device)
    shapes = ([({0: batch},) * 6] * LAYERS, [(None,) * 3] * LAYERS, {0: batch}, {0: batch})
    program = torch.export.export(Step(states(pools), states(convs)), make_arguments(device), dynamic_shapes=shapes)
    if decomposed:
        program = program.run_decompositions()
        assert len(program.graph_signature.buffers_to_mutate) == 2 * LAYERS
    torch.export.save(program, tmp_path / "step.pt2")
    module = torch.export.load(tmp_path / "step.pt2").module()

    def loaded(pools, convs, *arguments):
        for layer, (pool, conv) in enumerate(zip(pools, convs, strict=True)):
            getattr(module, f"pool_{layer}").copy_(pool)
            getattr(module, f"conv_{layer}").copy_(conv)
        o = module(*arguments)
        for layer, (pool, conv) in enumerate(zip(pools, convs, strict=True)):
            pool.copy_(getattr(module, f"pool_{layer}"))
            conv.copy_(getattr(module, f"conv_{layer}"))
        return o

    for size in (3, 1, 8):
        check_equal(loaded, device, make_arguments(device, size))

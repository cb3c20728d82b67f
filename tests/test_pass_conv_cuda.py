"""Short convolutions on a GPU, where the pass replaces them by default: compiled by Inductor, and in CUDA graphs."""

import pytest
import torch

pytest.importorskip("triton")
import conv_layers as conv
from conv_layers import layer, make_inputs
from rewriting import copied
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor import config

from compile_passes import RecoverSSMPass, explain, recoverssm_passes
from compile_passes.install import SLOT

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SPELLINGS = {
    "library": layer(),
    "shifted": layer(conv.shifted, conv.indexed),
    "sliding": layer(conv.sliding, conv.sliding_history),
    "each_token": layer(conv.each_token, conv.stacked_histories),
}


def on_gpu(dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.cuda() for x in make_inputs(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in SPELLINGS), ("library", torch.bfloat16)]
)
def test_replaced_by_default_and_equal(name, dtype):
    fn, args, expected = SPELLINGS[name], on_gpu(dtype), on_gpu(dtype)
    torch._dynamo.reset()
    ReinplaceCounters.clear()
    added = RecoverSSMPass()
    options = {SLOT: added, "fx_graph_cache": False}
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False):
        result = torch.compile(fn, options=options)(*args)
    assert [c.reason for c in added.last_report.convolutions] == [None]
    eager = fn(*expected)
    # The library that eager code calls may multiply float32 as tf32.
    tolerance = max(4 * torch.finfo(dtype).eps, 2**-9)
    torch.testing.assert_close(result, eager, rtol=tolerance, atol=tolerance * eager.abs().max().item())
    assert torch.equal(args[0], expected[0]) and ReinplaceCounters.get_total_missed() == 0


def test_explain_agrees():
    args = on_gpu(torch.float32)
    assert explain(layer(), *args).convolutions_replaced == 1


def test_b31_cuda_graphs_are_not_skipped():
    """Replays with other counts and slots, each against the eager layer."""
    pool, slots, x, weight, bias, n = on_gpu(torch.float32)
    expected = pool.clone()
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.mark_static_address(pool)  # as a module's buffer is
    with recoverssm_passes() as added, config.patch(fx_graph_cache=False), torch.no_grad():
        step = torch.compile(layer(), mode="reduce-overhead")
        for i in range(6):
            args = (slots.roll(i) % conv.SLOTS, x * (i + 1), weight, bias, n.roll(i))
            torch.compiler.cudagraph_mark_step_begin()
            result = step(pool, *(a.clone() for a in args)).clone()
            eager = layer()(expected, *copied(args))
            torch.testing.assert_close(result, eager, rtol=2**-9, atol=2**-9 * eager.abs().max().item())
            assert torch.equal(pool, expected), f"step {i}"
    assert added.reports[0].convolutions_replaced == 1
    assert counters["inductor"]["cudagraph_skips"] == 0

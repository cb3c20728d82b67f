"""A window written as ``scan``: its body is read as the loop it stands for, and stays a scan where it is not understood."""

import pytest
import torch
from plain_layers import B, make_inputs, plain_step
from rewriting import calls, copied, run_rewritten
from torch._higher_order_ops.scan import scan

import recoverssm_ops.ops as ops


def layer(step):
    def run(pool, slots, q, k, v, g, beta, n):
        def body(S, x):
            S, o = step(S, *x)
            return S, (S.clone(), o)

        _, (states, o) = scan(body, pool[slots], tuple(x.transpose(0, 1) for x in (q, k, v, g, beta)))
        pool[slots] = states[n - 1, torch.arange(B)]
        return o.transpose(0, 1)

    return run


def odd_step(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S.tanh(), o


@pytest.mark.parametrize("step", [plain_step, odd_step], ids=["recurrence", "look_alike"])
def test_scan_over_the_window(step):
    args, expected = make_inputs(), make_inputs()
    result, seen = run_rewritten(layer(step), *args, dynamic=False)
    torch.testing.assert_close((result, args[0]), (layer(step)(*copied(expected)), _pool_after(step, expected)))
    scans = calls(seen.graph, torch.ops.higher_order.scan)
    if step is plain_step:
        assert [layer.form for layer in seen.report.layers] == ["commit"] and not scans
        assert len(calls(seen.graph, ops.kda_verify)) == 1
    else:
        assert seen.report.matched == 0 and seen.untouched and len(scans) == 1


def _pool_after(step, args):
    args = copied(args)
    layer(step)(*args)
    return args[0]

"""What torch.library knows about the all-layers operators: schemas, fakes, mutation."""

import textwrap

import pytest
import torch
from expecttest import TestCase
from layers_cases import LAYERS, make_conv_layers, make_layers, make_plan, verify_all
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import recoverssm_ops as rs
from recoverssm_ops import layers_ops

NAMES = ("kda_commit_layers", "causal_conv1d_commit_layers")


class Schemas(TestCase):
    def test_released_schemas_are_frozen(self):
        """A schema is not part of the compile caches' key: a change under the same name reuses stale code."""
        schemas = [str(getattr(torch.ops.recoverssm, name).default._schema) for name in NAMES]
        text = "\n".join(textwrap.fill(schema, 100, subsequent_indent="    ") for schema in schemas)
        self.assertExpectedInline(
            text,
            """\
recoverssm::kda_commit_layers(Tensor(a!)[] states, Tensor[] u, Tensor[] k, Tensor[] g, Tensor
    source, Tensor dest, Tensor length, Tensor? cu_seqlens, int max_seqlen, Tensor[] A_log, Tensor[]
    dt_bias, float lower_bound, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, int
    pad_slot_id) -> ()
recoverssm::causal_conv1d_commit_layers(Tensor(a!)[] conv_states, Tensor[] xs, Tensor source, Tensor
    dest, Tensor length, Tensor? cu_seqlens, int pad_slot_id) -> ()""",
        )


def test_schemas_suit_functionalization():
    """No default, no keyword-only argument, no result; the pools are the only mutated argument, a list."""
    for name, pools in zip(NAMES, ("states", "conv_states"), strict=True):
        operator = getattr(torch.ops.recoverssm, name).default
        assert not operator._schema.returns and torch.Tag.pt2_compliant_tag in operator.tags
        for argument in operator._schema.arguments:
            assert not argument.has_default_value() and not argument.kwarg_only, f"{name}: {argument.name}"
        assert [argument.name for argument in operator._schema.arguments if argument.is_write] == [pools]


def test_schema_strings_are_those_registered():
    for name, text in zip(NAMES, layers_ops.SCHEMAS, strict=True):
        assert torch._C.parse_schema(f"recoverssm::{text}") == getattr(torch.ops.recoverssm, name).default._schema


def raw_calls(device, *, columns=1, pad_all=False, **kind):
    """Both operators' raw arguments, caught where the public functions pass them on, and the pools."""
    plan = make_plan(device, 3, columns)
    if pad_all:
        plan = rs.CommitPlan(torch.full_like(plan.source, -1), plan.dest, plan.length)
    pools, windows = make_layers(device, **kind)
    convs, xs, cu_seqlens = make_conv_layers(device, **{k: v for k, v in kind.items() if k in ("dtype", "lengths")})
    records = verify_all(pools, windows, plan.source)
    calls = {}

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "recoverssm":
                calls[function] = args
                return None
            return function(*args, **(kwargs or {}))

    with Catch():
        rs.kda_commit_layers([pool.state for pool in pools], records, None, plan=plan)
        rs.causal_conv1d_commit_layers([pool.state for pool in convs], xs, None, plan=plan, cu_seqlens=cu_seqlens)
    assert len(calls) == 2
    return calls, pools + convs


KINDS = {
    "dense": {},
    "packed": {"lengths": [4, 0, 2]},
    "all padding": {"pad_all": True},
    "bf16": {"dtype": torch.bfloat16},
    "precomputed gate": {"gate": "precomputed"},
    "two columns": {"columns": 2},
    "one layer": {"layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device, kind):
    """Mutation and aliasing as declared, dispatch under AOTAutograd, static and dynamic."""
    calls, _ = raw_calls(device, **KINDS[kind])
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments)


def test_fakes_look_at_no_value(device):
    calls, pools = raw_calls(device)
    for operator, arguments in calls.items():
        with FakeTensorMode() as mode:
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            assert operator(*fakes) is None
    for pool in pools:
        pool.check_unchanged()


def test_the_declared_mutation_happens_in_every_layer(device):
    """opcheck does not catch a mutation that is declared and never made."""
    calls, pools = raw_calls(device)
    for operator, arguments in calls.items():
        operator(*arguments)
    assert len(pools) == 2 * LAYERS
    for pool in pools:
        with pytest.raises(AssertionError, match="elements of the pool were written"):
            pool.check_unchanged()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b35_grad_modes_give_the_same_bits(device, mode):
    results = []
    for context in (torch.enable_grad, mode):
        calls, pools = raw_calls(device)
        with context():
            for operator, arguments in calls.items():
                operator(*arguments)
        results.append([pool.storage for pool in pools])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))

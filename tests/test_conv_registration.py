"""What torch.library knows about the convolution's operators: schemas, fakes, mutation."""

import textwrap

import pytest
import torch
from conv_cases import guarded_conv_pool, make_conv_window
from expecttest import TestCase
from pools import same_bits
from torch._subclasses import FakeTensorMode

import recoverssm_ops as rs
from recoverssm_ops import conv_ops

NAMES = ("causal_conv1d_verify", "causal_conv1d_commit")


class Schemas(TestCase):
    def test_released_schemas_are_frozen(self):
        """A schema is not part of the compile caches' key: a change under the same name reuses stale code."""
        schemas = [str(getattr(torch.ops.recoverssm, name).default._schema) for name in NAMES]
        text = "\n".join(textwrap.fill(schema, 100, subsequent_indent="    ") for schema in schemas)
        self.assertExpectedInline(
            text,
            """\
recoverssm::causal_conv1d_verify(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor?
    conv_state_indices, Tensor? cu_seqlens, int max_seqlen, bool silu, int pad_slot_id) -> Tensor
recoverssm::causal_conv1d_commit(Tensor(a!) conv_state, Tensor x, Tensor source, Tensor dest, Tensor
    length, Tensor? cu_seqlens, int pad_slot_id) -> ()""",
        )


def test_schemas_suit_every_runtime():
    """No default, no keyword-only argument, no list, no optional output; each operator mutates at most its pool."""
    for name in NAMES:
        operator = getattr(torch.ops.recoverssm, name).default
        for argument in operator._schema.arguments:
            assert not argument.has_default_value() and not argument.kwarg_only, f"{name}: {argument.name}"
            assert str(argument.type) in ("Tensor", "Optional[Tensor]", "int", "bool"), f"{name}: {argument.name}"
        assert all(str(result.type) == "Tensor" for result in operator._schema.returns)
        mutated = [argument.name for argument in operator._schema.arguments if argument.is_write]
        assert mutated == (["conv_state"] if name == "causal_conv1d_commit" else [])
        assert torch.Tag.pt2_compliant_tag in operator.tags


def test_schema_strings_are_those_registered():
    for name, text in zip(NAMES, conv_ops.SCHEMAS, strict=True):
        assert torch._C.parse_schema(f"recoverssm::{text}") == getattr(torch.ops.recoverssm, name).default._schema


def raw_calls(device, lengths=None, slots=(2, 0, 3), batch=3, columns=1, pool_dtype=torch.float32, **kind):
    """Both operators' raw arguments for one window, caught where the public functions pass them on."""
    window = make_conv_window(batch, 4, lengths=lengths, tail=2 if lengths else 0, device=device, **kind)
    pool = guarded_conv_pool(4, 12, dtype=pool_dtype, device=device)
    calls = {}

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "recoverssm":
                calls[function] = args
            return function(*args, **(kwargs or {}))

    slots = torch.tensor(slots, dtype=torch.int32, device=device)
    n = (torch.arange(batch, device=device) + 1) % 4
    with Catch():
        rs.causal_conv1d_verify(*window.inputs, pool.state, slots, **window.options)
        plan = rs.CommitPlan(slots, slots[:, None].expand(-1, columns), n[:, None].expand(-1, columns))
        rs.causal_conv1d_commit(pool.state, window.x, None, plan=plan, **window.layout)
    assert len(calls) == 2
    return calls, pool


KINDS = {
    "dense": {},
    "packed": {"lengths": [4, 0, 2]},
    "padding": {"slots": (2, -1, 3)},
    "all padding": {"slots": (-1, -1, -1)},
    "empty batch": {"slots": (), "batch": 0},
    "bf16": {"dtype": torch.bfloat16},
    "fp16 with a float32 state": {"dtype": torch.float16},
    "float32 with a bf16 state": {"pool_dtype": torch.bfloat16},
    "no bias, no activation": {"bias": False, "activation": None},
    "two columns": {"columns": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device, kind):
    """Mutation and aliasing as declared, fakes like the kernels, dispatch under AOTAutograd, static and dynamic."""
    calls, _ = raw_calls(device, **KINDS[kind])
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_give_what_the_kernels_give(device, kind):
    """Shape, dtype, stride and device; the inputs are fake too, so that no value can have been looked at."""
    calls, _ = raw_calls(device, **KINDS[kind])
    for operator, arguments in calls.items():
        real = operator(*arguments)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        if real is None:
            assert fake is None
        else:
            assert (real.shape, real.dtype, real.stride(), real.device) == (
                fake.shape, fake.dtype, fake.stride(), fake.device,
            )  # fmt: skip


def test_the_declared_mutation_happens(device):
    """opcheck does not catch a mutation that is declared and never made."""
    calls, pool = raw_calls(device)
    pool.remember()
    torch.ops.recoverssm.causal_conv1d_commit(*calls[torch.ops.recoverssm.causal_conv1d_commit.default])
    pool.check_only_written([2, 0, 3])
    with pytest.raises(AssertionError, match="elements of the pool were written"):
        pool.check_unchanged()


def test_vmap_of_a_commit_is_an_error(device):
    """There is no batching rule; the fallback would commit copies."""
    calls, pool = raw_calls(device)
    arguments = calls[torch.ops.recoverssm.causal_conv1d_commit.default]
    pool.remember()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for recoverssm::causal_conv1d_commit"):
        torch.vmap(lambda state: torch.ops.recoverssm.causal_conv1d_commit(state, *arguments[1:]))(pool.state[None])
    pool.check_unchanged()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b35_grad_modes_give_the_same_bits(device, mode):
    results = []
    for context in (torch.enable_grad, mode):
        window, pool = make_conv_window(2, 4, device=device), guarded_conv_pool(2, 12, device=device)
        with context():
            y = rs.causal_conv1d_verify(*window.inputs, pool.state, **window.options)
            rs.causal_conv1d_commit(pool.state, window.x, torch.tensor([3, 1], device=device))
        results.append((y, pool.storage))
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_b35_autocast_changes_nothing(device, dtype):
    """A cast of the pool to a temporary would lose the mutation; a cast of an input would lose precision."""
    results = []
    for enabled in (False, True):
        window = make_conv_window(2, 4, lengths=[4, 2], device=device)
        pool = guarded_conv_pool(2, 12, device=device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            y = rs.causal_conv1d_verify(*window.inputs, pool.state, **window.options)
            rs.causal_conv1d_commit(pool.state, window.x, torch.tensor([3, 1], device=device), **window.layout)
        results.append((y, pool.storage))
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))

"""What torch.library knows about the operators: schemas, fakes, mutation."""

import textwrap

import pytest
import torch
from expecttest import TestCase
from pools import guarded_pool, make_window, same_bits
from torch._subclasses import FakeTensorMode

import recoverssm_ops as rs
from recoverssm_ops import ops

NAMES = ("kda_verify", "kda_commit", "kda_recover")


class Schemas(TestCase):
    def test_released_schemas_are_frozen(self):
        """A schema is not part of the compile caches' key: a change under the same name reuses stale code."""
        schemas = [str(getattr(torch.ops.recoverssm, name).default._schema) for name in NAMES]
        text = "\n".join(textwrap.fill(schema, 100, subsequent_indent="    ") for schema in schemas)
        self.assertExpectedInline(
            text,
            """\
recoverssm::kda_verify(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor?
    state_indices, Tensor? cu_seqlens, int max_seqlen, Tensor? A_log, Tensor? dt_bias, float
    lower_bound, float scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool
    use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int pad_slot_id) -> (Tensor, Tensor)
recoverssm::kda_commit(Tensor(a!) state, Tensor u, Tensor k, Tensor g, Tensor source, Tensor dest,
    Tensor length, Tensor? cu_seqlens, int max_seqlen, Tensor? A_log, Tensor? dt_bias, float
    lower_bound, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, int pad_slot_id) -> ()
recoverssm::kda_recover(Tensor initial_state, Tensor u, Tensor k, Tensor g, Tensor num_accepted,
    Tensor? cu_seqlens, int max_seqlen, Tensor? A_log, Tensor? dt_bias, float lower_bound, bool
    use_qk_l2norm_in_kernel, bool use_gate_in_kernel) -> Tensor""",
        )


def test_schemas_suit_every_runtime():
    """No default, no keyword-only argument, no list, no optional output; each operator mutates at most its pool."""
    for name in NAMES:
        schema = getattr(torch.ops.recoverssm, name).default._schema
        for argument in schema.arguments:
            assert not argument.has_default_value() and not argument.kwarg_only, f"{name}: {argument.name}"
            kind = str(argument.type)
            assert kind in ("Tensor", "Optional[Tensor]", "int", "float", "bool"), f"{name}: {argument.name} is {kind}"
        assert all(str(result.type) == "Tensor" for result in schema.returns)
        mutated = [argument.name for argument in schema.arguments if argument.is_write]
        assert mutated == (["state"] if name == "kda_commit" else [])
        assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.recoverssm, name).default.tags


def raw_calls(device, dtype=torch.float32, lengths=None, slots=(2, 0, 3), batch=3, columns=1, **kind):
    """The three operators' raw arguments for one window, caught where the public functions pass them on."""
    window = make_window(
        batch, 4, value_heads=4, lengths=lengths, tail=2 if lengths else 0, dtype=dtype, device=device, **kind
    )
    pool = guarded_pool(4, 4, 6, 8, dtype=dtype, device=device)
    calls = {}

    class Catch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "recoverssm":
                calls[function] = args
            return function(*args, **(kwargs or {}))

    slots = torch.tensor(slots, dtype=torch.int32, device=device)
    n = (torch.arange(batch, device=device) + 1) % 4
    with Catch():
        _, record = rs.kda_verify(*window.inputs, pool.state, slots, **window.options)
        rs.kda_recover(pool.state[slots.clamp(min=0)], record, n)
        plan = rs.CommitPlan(slots, slots[:, None].expand(-1, columns), n[:, None].expand(-1, columns))
        rs.kda_commit(pool.state, record, None, plan=plan)
    assert len(calls) == 3
    return calls, pool


KINDS = {
    "dense": {},
    "packed": {"lengths": [4, 0, 2]},
    "padding": {"slots": (2, -1, 3)},
    "all padding": {"slots": (-1, -1, -1)},
    "empty batch": {"slots": (), "batch": 0},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "bf16 with a float32 gate": {"dtype": torch.bfloat16, "gate_dtype": torch.float32},
    "unbounded": {"gate": "unbounded"},
    "precomputed scalar gate": {"gate": "precomputed", "scalar_gate": True},
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
            fake_arguments = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            fake = operator(*fake_arguments)
        pairs = [] if real is None else zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
        for x, y in pairs:
            assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device), operator


@pytest.mark.parametrize("transposed", ["q", "k", "v", "g"])
def test_outputs_are_row_major_whatever_the_inputs_are(device, transposed):
    window = make_window(2, 4, value_heads=4, device=device)
    x = getattr(window, transposed).transpose(1, 2).contiguous().transpose(1, 2)
    window = window.with_inputs(**{transposed: x})
    pool = guarded_pool(2, 4, 6, 8, order="head-first", device=device)
    o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
    recovered = rs.kda_recover(pool.state, record, torch.tensor([1, 0], device=device))
    for result in (o, record.u, recovered):
        assert result.is_contiguous()


def test_the_declared_mutation_happens(device):
    """opcheck does not catch a mutation that is declared and never made."""
    calls, pool = raw_calls(device)
    arguments = calls[torch.ops.recoverssm.kda_commit.default]
    pool.remember()
    torch.ops.recoverssm.kda_commit(*arguments)
    pool.check_only_written([2, 0, 3])
    with pytest.raises(AssertionError, match="elements of the pool were written"):
        pool.check_unchanged()


def test_schema_strings_are_those_registered():
    """A compile pass puts ``ops.SCHEMAS`` into its cache key."""
    for name, text in zip(NAMES, ops.SCHEMAS, strict=True):
        registered = getattr(torch.ops.recoverssm, name).default._schema
        assert torch._C.parse_schema(f"recoverssm::{text}") == registered


def test_vmap_of_a_commit_is_an_error(device):
    """There is no batching rule; the fallback would commit copies."""
    calls, pool = raw_calls(device)
    arguments = calls[torch.ops.recoverssm.kda_commit.default]
    pool.remember()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for recoverssm::kda_commit"):
        torch.vmap(lambda state: torch.ops.recoverssm.kda_commit(state, *arguments[1:]))(pool.state[None])
    pool.check_unchanged()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b35_grad_modes_give_the_same_bits(device, mode):
    window = make_window(2, 4, device=device)
    pools = []
    for context in (torch.enable_grad, mode):
        pool = guarded_pool(2, 2, 6, 8, device=device)
        with context():
            _, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
            rs.kda_commit(pool.state, record, torch.tensor([3, 1], device=device))
        pools.append(pool.storage)
    assert same_bits(*pools)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_b35_autocast_changes_nothing(device, dtype):
    """A cast of the pool to a temporary would lose the mutation; a cast of an input would lose precision."""
    window = make_window(2, 4, device=device)
    pools, outputs = [], []
    for enabled in (False, True):
        pool = guarded_pool(2, 2, 6, 8, device=device)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            o, record = rs.kda_verify(*window.inputs, pool.state, **window.options)
            recovered = rs.kda_recover(pool.state, record, torch.tensor([3, 1], device=device))
            rs.kda_commit(pool.state, record, torch.tensor([3, 1], device=device))
        pools.append(pool.storage)
        outputs.append((o, record.u, recovered))
    assert same_bits(*pools)
    assert all(same_bits(x, y) for x, y in zip(*outputs, strict=True))

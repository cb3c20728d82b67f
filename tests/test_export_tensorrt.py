"""Torch-TensorRT: all of verify and of the functional commit is converted; an update in place is refused, not lost.

A dry run lowers and partitions without a GPU, and its partitions are graphs that the CPU can run.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from exporting import Operators, export_small, named_inputs, pools_of, run_program, small_step, step_inputs
from test_export_step import function_inputs
from test_ops_export import fresh_process

import recoverssm_ops.tensorrt

TESTS = Path(__file__).parent
needs_torch_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None, reason="torch_tensorrt is not installed (extra: tensorrt)"
)

PROGRAMS = f"""
import json, logging, sys
sys.path.insert(0, {str(TESTS)!r})
from tensorrt_without_gpu import build_engines_only, import_torch_tensorrt
torch_tensorrt = import_torch_tensorrt()
import torch
logging.disable(logging.WARNING)
from exporting import convolutions_replaced, export_small, named_inputs, pools_of, run_program, small_step, step_inputs
import recoverssm_ops.tensorrt

def programs():
    for dynamic in (False, True):
        if not any(name.endswith(str(dynamic)) for name in WANTED):
            continue
        exported = export_small(small_step(), functional=True, portable=True, dynamic=dynamic)
        values = named_inputs(exported, step_inputs()) | pools_of(small_step())
        halves = run_program(exported, "verify", values)
        values |= halves | {{"num_accepted": halves["result_1"]}}
        for name in ("step", "verify", "commit"):
            if f"{{name}} {{dynamic}}" not in WANTED:
                continue
            inputs = [values[port["name"]] for port in exported.manifest.programs[name]["inputs"]]
            yield f"{{name}} {{dynamic}}", getattr(exported, name), inputs
        if f"operators {{dynamic}}" not in WANTED:
            continue
        with convolutions_replaced():
            exported = export_small(small_step(), dynamic=dynamic)
        inputs = [values[port["name"]] for port in exported.manifest.programs["verify"]["inputs"]]
        yield f"operators {{dynamic}}", exported.verify, inputs

found = {{}}
"""
DRY_RUN = f"""{PROGRAMS}
for name, program, inputs in programs():
    partitioned = recoverssm_ops.tensorrt.compile(program, inputs, dryrun=True)
    for x, y in zip(partitioned(*inputs), program.module()(*inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    found[name] = [part for part, _ in partitioned.named_children()]
print("found", json.dumps(found))
"""
# Products in pieces, which is the most that there is to convert.
BUILD = f"""{PROGRAMS}
if not torch_tensorrt.ENABLED_FEATURES.tensorrt_rtx:
    print("found", json.dumps(None))
    sys.exit()
build_engines_only()
for name, program, inputs in programs():
    engine = recoverssm_ops.tensorrt.compile(program, inputs, split_products=True)
    found[name] = len(engine)
print("found", json.dumps(found))
"""
# "operators": the verify half whose commit stays in PyTorch, as exported on CUDA. Verify is a part of the step.
EACH = [f"{name} {dynamic}" for dynamic in (False, True) for name in ("step", "verify", "commit", "operators")]


def some_and_all(*some):
    return pytest.mark.parametrize(
        "wanted", [some, pytest.param(EACH, marks=pytest.mark.exhaustive)], ids=["some", "all"]
    )


def in_a_process(code, wanted):
    result = fresh_process(f"WANTED = {wanted!r}\n{code}")
    lines = [line for line in result.stdout.splitlines() if line.startswith("found ")]
    assert lines, result.stdout + result.stderr
    return json.loads(lines[0].removeprefix("found "))


@needs_torch_tensorrt
@pytest.mark.slow
@some_and_all("step True", "commit False")
def test_every_program_is_one_engine(wanted):
    assert in_a_process(DRY_RUN, wanted) == {name: ["_run_on_acc_0"] for name in wanted}


@needs_torch_tensorrt
@pytest.mark.slow
@some_and_all("operators True", "commit False")
def test_every_engine_is_built(wanted):
    """Converted and compiled, but for what TensorRT-RTX leaves to the machine that loads the engine."""
    found = in_a_process(BUILD, wanted)
    if found is None:
        pytest.skip("TensorRT builds an engine on a GPU; TensorRT-RTX is not what is installed")
    assert set(found) == set(wanted) and all(found.values())


def test_lowered_operators_compute_the_same():
    """Without torch_tensorrt: what it would receive holds neither our operators nor scans, and is right."""
    model, given = Operators(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True), function_inputs()
    lowered = recoverssm_ops.tensorrt.lower(torch.export.export(model, given))
    names = {str(node.target) for node in lowered.graph.nodes if node.op == "call_function"}
    assert not any("recoverssm" in name or "cumsum" in name for name in names)
    torch.testing.assert_close(lowered.module()(*given), model(*given))


@pytest.mark.parametrize("portable", [False, True])
def test_an_update_in_place_is_refused_with_the_remedy(portable):
    exported = export_small(small_step(), portable=portable)
    for program in (exported.step, exported.commit):
        with pytest.raises(ValueError, match=r"updates pools.*a TensorRT engine has no mutation.*functional=True"):
            recoverssm_ops.tensorrt.compile(program, [])


def test_nothing_is_imported_before_it_is_asked_for():
    code = "import sys, recoverssm_ops.tensorrt; print([m for m in ('torch_tensorrt', 'tensorrt') if m in sys.modules])"
    assert fresh_process(code).stdout.strip() == "[]"


def test_attention_of_a_cuda_export():
    """Such a program holds the attention kernel by name, which only runs there: its replacement alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (4, 7, 7))
    bias = torch.where(torch.rand(2, 1, 4, 7, generator=generator) < 0.3, -torch.inf, 0.0)
    bias[..., 0] = 0
    for options in ({}, {"scale": 0.3}):
        o, *rest = recoverssm_ops.tensorrt_forms.efficient_attention(q, k, v, bias, False, **options)
        assert rest == [None] * 3
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, **options)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    o = recoverssm_ops.tensorrt_forms.efficient_attention(k, k, v, None, False, 0.0, True)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(k, k, v, is_causal=True)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)


class Recurrence(torch.nn.Module):
    """A product of each kind, in each of the ways to write it."""

    def forward(self, x, y, z):
        rows = torch.einsum("bik,bjk->bij", x, y) @ z
        return (
            rows,
            torch.nn.functional.linear(x, y[0]),
            torch.addmm(z[0], x[0], z[0]),
            (x @ y.mT).bfloat16() @ z.bfloat16(),
        )


class Tf32(torch.fx.Interpreter):
    """Runs a graph as TensorRT-RTX does on an H200: float32 factors are rounded to the nearest number of tf32."""

    def call_function(self, target, args, kwargs):
        if target in recoverssm_ops.tensorrt_products._FACTORS:
            args = list(args)
            for i in recoverssm_ops.tensorrt_products._FACTORS[target]:
                if args[i].dtype == torch.float32:
                    args[i] = (args[i].view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
        return super().call_function(target, tuple(args), kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_products_in_pieces(dynamic):
    generator = torch.Generator().manual_seed(0)
    given = tuple(torch.randn(3, 32, 32, generator=generator) for _ in range(3))
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(Recurrence(), given, dynamic_shapes=({0: batch},) * 3 if dynamic else None)
    exact = Recurrence()(*(x.double() for x in given))
    sums = Recurrence()(*(x.double().abs() for x in given))
    errors = {}
    for split in (False, True):
        lowered = program.run_decompositions(recoverssm_ops.tensorrt_products.decompositions())
        if split:
            lowered = recoverssm_ops.tensorrt.lower(program, split_products=True)
        outputs = Tf32(lowered.graph_module).run(*given)
        errors[split] = [((x - y).abs() / z).max().log2().item() for x, y, z in zip(outputs, exact, sums, strict=True)]
    # The first is a product of products. The last is of bfloat16 factors, which tf32 holds.
    assert all(error > -14 for error in errors[False][:3])
    assert all(error < bound for error, bound in zip(errors[True], (-16, -17, -17, -6), strict=True)), errors


def test_index_put_of_several_axes():
    class Put(torch.nn.Module):
        def forward(self, x, rows, columns, value):
            return x.index_put((rows[:, None], columns), value), x.index_put(
                (rows, columns[:, 0], columns[:, 0]), value[0, 0, 0]
            )

    batch = torch.export.Dim("batch", min=2, max=8)
    shapes = (None, {0: batch}, {0: batch}, {0: batch})
    # A slot that occurs twice receives the same twice.
    given = (
        torch.randn(9, 8, 8, 2),
        torch.tensor([3, -1, 3]),
        torch.tensor([[0, 2], [-1, 5], [0, 2]]),
        torch.randn(3, 2, 8, 2),
    )
    given[3][2] = given[3][0]
    for dynamic in (None, shapes):
        lowered = recoverssm_ops.tensorrt.lower(torch.export.export(Put(), given, dynamic_shapes=dynamic))
        puts = [node for node in lowered.graph.nodes if node.target == torch.ops.aten.index_put.default]
        assert [[index.meta["val"].ndim for index in node.args[1]] for node in puts] == [[1], [1]]
        for x, y in zip(lowered.module()(*given), Put()(*given), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_convolution_as_products(dtype):
    class Short(torch.nn.Module):
        def forward(self, x, weight, bias):
            return torch.nn.functional.conv1d(x, weight, bias, groups=6)

    given = torch.randn(2, 6, 9).to(dtype), torch.randn(6, 1, 4).to(dtype), torch.randn(6).to(dtype)
    lowered = recoverssm_ops.tensorrt.lower(torch.export.export(Short(), given))
    assert "convolution" not in str(lowered.graph)
    torch.testing.assert_close(lowered.module()(*given), Short()(*given))


def test_a_gather_of_dynamic_sizes():
    class Gather(torch.nn.Module):
        def forward(self, x, index):
            return x.gather(1, index), x.gather(-1, index)

    batch = torch.export.Dim("batch", min=2, max=8)
    given = torch.randn(3, 5, 5), torch.randint(5, (3, 5, 5))
    shapes = ({0: batch}, {0: batch})
    lowered = recoverssm_ops.tensorrt.lower(torch.export.export(Gather(), given, dynamic_shapes=shapes))
    assert "gather" not in str(lowered.graph)
    for size in (3, 6):
        given = torch.randn(size, 5, 5), torch.randint(5, (size, 5, 5))
        for x, y in zip(lowered.module()(*given), Gather()(*given), strict=True):
            assert torch.equal(x, y)


@needs_torch_tensorrt
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["verify", "commit", "step", "operators"])
def test_engine_equals_the_program(name, dynamic):
    """Built and run. Products are float32 in another order, or in pieces, which costs a tenth of these bounds; tf32 costs ten
    of them (``Tf32`` gives the errors that an H200 gave). Twice the sizes from one profile."""
    form = {} if name == "operators" else {"functional": True, "portable": True}
    exported = export_small(small_step().cuda(), dynamic=dynamic, device="cuda", **form)
    name = "verify" if name == "operators" else name
    program, ports = getattr(exported, name), exported.manifest.programs[name]
    engine = None
    for batch in (3, 7) if dynamic else (3,):
        given = tuple(x.cuda() for x in step_inputs(batch, seed=batch))
        values = named_inputs(exported, given) | {key: x.cuda() for key, x in pools_of(small_step()).items()}
        halves = run_program(exported, "verify", values)
        values |= halves | {"num_accepted": halves["result_1"]}
        inputs = [values[port["name"]].contiguous() for port in ports["inputs"]]
        if engine is None:
            engine = recoverssm_ops.tensorrt.compile(program, inputs)
            (part,) = (part for part, _ in engine.named_children())
            assert "_run_on_acc" in part
        for port, x, y in zip(ports["outputs"], engine(*inputs), program.module()(*inputs), strict=True):
            assert x.dtype == y.dtype, port
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, msg=lambda m, p=port: f"{p['name']}: {m}")

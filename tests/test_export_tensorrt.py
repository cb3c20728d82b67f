"""Torch-TensorRT: all of verify and of the functional commit is converted; an update in place is refused, not lost.

A dry run lowers and partitions without a GPU, and its partitions are graphs that the CPU can run.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from exporting import Operators, export_small, small_step
from test_export_step import function_inputs
from test_ops_export import fresh_process

import recoverssm_ops.tensorrt

TESTS = Path(__file__).parent
needs_torch_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None, reason="torch_tensorrt is not installed (extra: tensorrt)"
)

DRY_RUN = f"""
import json, logging, sys
sys.path.insert(0, {str(TESTS)!r})
from tensorrt_without_gpu import import_torch_tensorrt
import_torch_tensorrt()
import torch
logging.disable(logging.WARNING)
from exporting import export_small, named_inputs, pools_of, run_program, small_step, step_inputs
import recoverssm_ops.tensorrt

exported = export_small(small_step(), functional=True, portable=True)
values = named_inputs(exported, step_inputs()) | pools_of(small_step())
halves = run_program(exported, "verify", values)
values |= halves | {{"num_accepted": halves["result_1"]}}
found = {{}}
for name in ("step", "verify", "commit"):
    program = getattr(exported, name)
    inputs = [values[port["name"]] for port in exported.manifest.programs[name]["inputs"]]
    partitioned = recoverssm_ops.tensorrt.compile(program, inputs, dryrun=True)
    for x, y in zip(partitioned(*inputs), program.module()(*inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    found[name] = [part for part, _ in partitioned.named_children()]
print("partitions", json.dumps(found))
"""


@needs_torch_tensorrt
@pytest.mark.slow
def test_every_program_is_one_engine():
    result = fresh_process(DRY_RUN)
    lines = [line for line in result.stdout.splitlines() if line.startswith("partitions ")]
    assert lines, result.stdout + result.stderr
    assert json.loads(lines[0].removeprefix("partitions ")) == {
        name: ["_run_on_acc_0"] for name in ("step", "verify", "commit")
    }


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


@needs_torch_tensorrt
@pytest.mark.cuda
@pytest.mark.parametrize("name", ["verify", "commit"])
def test_engine_equals_the_program(name):
    """On a GPU the engine runs; its arithmetic is float32 (tf32 is off), in another order."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from exporting import named_inputs, pools_of, run_program, step_inputs

    exported = export_small(small_step().cuda(), functional=True, portable=True, device="cuda")
    values = named_inputs(exported, step_inputs()) | pools_of(small_step())
    values = {key: value.cuda() for key, value in values.items()}
    halves = run_program(exported, "verify", values)
    values |= halves | {"num_accepted": halves["result_1"]}
    inputs = [values[port["name"]].contiguous() for port in exported.manifest.programs[name]["inputs"]]
    engine = recoverssm_ops.tensorrt.compile(getattr(exported, name), inputs)
    for x, y in zip(engine(*inputs), getattr(exported, name).module()(*inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)

"""The Triton kernels inside an exported program, as far as it can be seen without a GPU; test_export_cuda.py runs them."""

import json

import pytest
import torch
from exporting import export_small, small_step
from test_ops_export import REPOSITORY, fresh_process

from compile_passes import export_step
from compile_passes.exporting.graph import ExportError

# Inductor asks Triton which arguments a kernel writes, and Triton asks for the GPU it would compile for.
TRACE = f"""
import json, sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from exporting import convolutions_replaced, export_small, small_step
from compile_passes import export_step
from models.decode import example_inputs

# 2 heads: from 49 rows on the launchers would shape the kernels otherwise.
exported = export_small(small_step(), dynamic=True, most=200, triton=True)
found = {{"dims": list(exported.manifest.dims.values())}}
for name in ("step", "verify", "commit"):
    calls = [n for n in getattr(exported, name).run_decompositions().graph.nodes if "triton_kernel" in str(n.target)]
    found[name] = [[sorted(n.kwargs["tensors_to_clone"]), str(n.kwargs["grid"][0][0])] for n in calls]
with convolutions_replaced():
    alone = export_step(small_step(), example_inputs(1, 3, 256, "cpu"), triton=True)
found["alone"] = [
    sum("triton_kernel" in str(n.target) for n in program.graph.nodes) for program in (alone.verify, alone.commit)
]
print("found", json.dumps(found), exported.manifest.operators)
"""


def test_kernels_are_visible_with_symbolic_grids_and_known_writes():
    result = fresh_process(TRACE)
    lines = [line for line in result.stdout.splitlines() if line.startswith("found ")]
    assert lines and lines[0].endswith(" triton"), result.stdout + result.stderr
    found = json.loads(lines[0].removeprefix("found ").removesuffix(" triton"))
    assert found.pop("dims") == [[2, 200]], "no choice of the launchers may narrow the batch"
    assert found.pop("alone") == [2, 2], "of one request, with the convolution's, in halves"
    (verify,), (commit,) = found["verify"], found["commit"]
    assert verify[0] == ["o", "u"]  # the pool is read, and must not be cloned
    assert "dest_state" in commit[0] and not {"source_state", "u", "k", "g"} & set(commit[0])
    assert [call[0] for call in found["step"]] == [verify[0], commit[0]]
    for name in found:
        assert all(not grid.isdigit() for _, grid in found[name]), "the grid should follow the batch"


def test_two_forms_at_once_are_refused():
    with pytest.raises(ValueError, match="portable and triton should not both be True"):
        export_step(torch.nn.Identity(), (torch.ones(2),), portable=True, triton=True)


def test_a_package_of_kernels_needs_cuda(tmp_path):
    """Traced on the CPU, the kernels are there; compiling them for it is refused."""
    exported = export_small(small_step(), triton=True)
    with pytest.raises(ExportError, match="Triton kernels run on CUDA, but step was exported on cpu"):
        exported.save(tmp_path, aot_inductor=("step",))

"""The Triton kernels inside an exported program: what can be seen of it without a GPU, and the packages on one."""

import json
import zipfile

import pytest
import torch
from exporting import (
    SLOTS,
    export_small,
    pools_of,
    run_eagerly,
    small_step,
    step_inputs,
)
from test_ops_export import REPOSITORY, fresh_process

from compile_passes import export_step, load_step
from compile_passes.exporting.graph import ExportError
from models.memory import peak_allocation

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
from exporting import export_small, small_step

exported = export_small(small_step(), dynamic=True, triton=True)
found = {{}}
for name in ("step", "verify", "commit"):
    calls = [n for n in getattr(exported, name).run_decompositions().graph.nodes if "triton_kernel" in str(n.target)]
    found[name] = [[sorted(n.kwargs["tensors_to_clone"]), str(n.kwargs["grid"][0][0])] for n in calls]
print("found", json.dumps(found), exported.manifest.operators)
"""


def test_kernels_are_visible_with_symbolic_grids_and_known_writes():
    result = fresh_process(TRACE)
    lines = [line for line in result.stdout.splitlines() if line.startswith("found ")]
    assert lines and lines[0].endswith(" triton"), result.stdout + result.stderr
    found = json.loads(lines[0].removeprefix("found ").removesuffix(" triton"))
    (verify,), (commit,) = found["verify"], found["commit"]
    assert verify[0] == ["o", "u"]  # the pool is read, and must not be cloned
    assert "dest_state" in commit[0] and not {"source_state", "u", "k", "g"} & set(commit[0])
    assert [call[0] for call in found["step"]] == [verify[0], commit[0]]
    for name in found:
        assert all(not grid.isdigit() for _, grid in found[name]), "the grid should follow the batch"


def test_two_forms_at_once_are_refused():
    with pytest.raises(ValueError, match="portable and triton should not both be True"):
        export_step(torch.nn.Identity(), (torch.ones(2),), portable=True, triton=True)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(step, dynamic, directory):
    exported = export_small(step.cuda(), dynamic=dynamic, triton=True, device="cuda")
    return exported.save(directory, aot_inductor=("step", "verify", "commit"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return on_gpu(small_step(slots=200 * SLOTS), True, tmp_path_factory.mktemp("cuda"))


@cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_package_holds_the_kernels_and_no_program(saved):
    names = zipfile.ZipFile(saved / "step.aoti.pt2").namelist()
    assert sum(name.endswith(".cubin") for name in names) >= 2, names
    assert not list(saved.glob("step.pt2"))
    assert json.loads((saved / "manifest.json").read_text())["operators"] == "triton"


@cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_package_runs_without_the_library(saved, tmp_path):
    cases = []
    for batch in (3, 2, 7):
        step = small_step(slots=200 * SLOTS).cuda()
        given = tuple(x.cuda() for x in step_inputs(batch, seed=batch))
        expected, after = run_eagerly(step, given)
        cases.append((given, pools_of(step), expected, after))
    torch.save(cases, tmp_path / "cases.pt")
    code = f"""
import sys, torch
package = torch._inductor.aoti_load_package({str(saved / "step.aoti.pt2")!r})
for given, before, expected, after in torch.load({str(tmp_path / "cases.pt")!r}):
    pools = {{name: pool.clone() for name, pool in before.items()}}
    package.load_constants(pools, check_full_update=False, user_managed=True)
    results = package(*given)
    assert all(torch.equal(x, y) for x, y in zip(results, expected))
    for name, pool in after.items():
        torch.testing.assert_close(pools[name], pool, rtol=1e-3, atol=1e-4)
    assert not torch.equal(pools["pools.recurrent_0"], before["pools.recurrent_0"])
print("right", *(name in sys.modules for name in ("recoverssm_ops", "compile_passes")))
"""
    result = fresh_process(code)
    assert result.stdout.split() == ["right", "False", "False"], result.stderr


def gpu_case(loaded, batch):
    step = small_step(slots=200 * SLOTS).cuda()
    given = tuple(x.cuda() for x in step_inputs(batch, seed=batch))
    values = dict(zip((port["name"] for port in loaded.step.inputs), given, strict=True)) | pools_of(step)
    return given, values, run_eagerly(step, given)


@cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_halves_update_the_callers_pools_and_copy_none(saved):
    loaded = load_step(saved, aot_inductor=True)
    given, values, (expected, after) = gpu_case(loaded, 5)
    verify_inputs = [values[port["name"]] for port in loaded.verify.inputs]
    outputs = loaded.verify(*verify_inputs)
    values |= dict(zip((port["name"] for port in loaded.verify.outputs), outputs, strict=True))
    values["num_accepted"] = outputs[1]
    commit_inputs = [values[port["name"]] for port in loaded.commit.inputs]
    loaded.commit(*commit_inputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=False))
    for name, pool in after.items():
        torch.testing.assert_close(values[name], pool, rtol=1e-3, atol=1e-4)
    pool_bytes = min(x.nbytes for name, x in values.items() if "recurrent" in name)
    for program, inputs in ((loaded.step, given), (loaded.verify, verify_inputs), (loaded.commit, commit_inputs)):
        program(*inputs)
        assert peak_allocation(lambda p=program, i=inputs: p(*i), "cuda") < pool_bytes, program.name


@cuda
@pytest.mark.cuda
@pytest.mark.slow
def test_a_cuda_graph_around_the_package(saved):
    """Captured once, replayed for other windows, drafts and slots."""
    package = load_step(saved, aot_inductor=True, run_single_threaded=True).step
    step = small_step(slots=200 * SLOTS).cuda()  # as the package's pools were when it was exported
    fixed = [x.cuda() for x in step_inputs(5, seed=0)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # loads the kernels, which must not happen inside the capture
            package(*fixed)
            with torch.no_grad():
                step(*fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = package(*fixed)
    for seed in (1, 2, 3):
        given = tuple(x.cuda() for x in step_inputs(5, seed=seed))
        with torch.no_grad():
            expected = step(*given)
        for held, x in zip(fixed, given, strict=True):
            held.copy_(x)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), seed


def test_a_package_of_kernels_needs_cuda(tmp_path):
    """Traced on the CPU, the kernels are there; compiling them for it is refused."""
    exported = export_small(small_step(), triton=True)
    with pytest.raises(ExportError, match="Triton kernels run on CUDA, but step was exported on cpu"):
        exported.save(tmp_path, aot_inductor=("step",))

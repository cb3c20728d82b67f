"""AOTInductor packages on CUDA with our Triton kernels inside: right without the library, in place, and in a CUDA graph."""

import json
import zipfile

import pytest
import torch
from export_packages import assert_pools, inputs_on_gpu, large_step, named_case, save_packages
from exporting import pools_of, run_eagerly
from test_ops_export import fresh_process

from compile_passes import load_step
from models.captured_step import CapturedStep
from models.memory import peak_allocation

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def saved(request, tmp_path_factory):
    return save_packages(tmp_path_factory.mktemp("packages"), dynamic=request.param)


def batches(saved) -> tuple[int, ...]:
    return (3, 2, 7) if json.loads((saved / "manifest.json").read_text())["dims"] else (3,)


def test_packages_hold_the_kernels_and_no_program(saved):
    for name, least in (("step", 2), ("verify", 1), ("commit", 1)):
        names = zipfile.ZipFile(saved / f"{name}.aoti.pt2").namelist()
        assert sum(n.endswith(".cubin") for n in names) >= least, names
        assert not (saved / f"{name}.pt2").exists()
    assert json.loads((saved / "manifest.json").read_text())["operators"] == "triton"


WITHOUT_THE_LIBRARY = """
import json, sys, torch
from pathlib import Path
saved = Path({saved!r})
programs = json.loads((saved / "manifest.json").read_text())["programs"]
packages = {{name: torch._inductor.aoti_load_package(str(saved / f"{{name}}.aoti.pt2")) for name in programs}}

def ports(name, kind):
    return [port["name"] for port in programs[name][kind]]

def near(found, expected):
    for name, pool in expected.items():
        torch.testing.assert_close(found[name], pool, rtol=1e-3, atol=1e-4, msg=lambda m: f"{{name}}: {{m}}")

for given, before, expected, after in torch.load({cases!r}):
    # The whole step, in the caller's tensors.
    pools = {{name: pool.clone() for name, pool in before.items()}}
    packages["step"].load_constants(pools, check_full_update=False, user_managed=True)
    results = packages["step"](*given)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    near(pools, after)
    assert not torch.equal(pools["pools.recurrent_0"], before["pools.recurrent_0"])

    # The halves.
    pools = {{name: pool.clone() for name, pool in before.items()}}
    values = dict(zip(ports("step", "inputs"), given)) | pools
    results = packages["verify"](*(values[name] for name in ports("verify", "inputs")))
    assert all(torch.equal(pool, before[name]) for name, pool in pools.items())
    values |= dict(zip(ports("verify", "outputs"), results)) | {{"num_accepted": results[1]}}
    packages["commit"](*(values[name] for name in ports("commit", "inputs")))
    assert all(torch.equal(x, y) for x, y in zip(results, expected))
    near(pools, after)
print("right", *(name in sys.modules for name in ("recoverssm_ops", "compile_passes")))
"""


def test_packages_run_without_the_library(saved, tmp_path):
    cases = []
    for batch in batches(saved):
        step, given = large_step(), inputs_on_gpu(batch, seed=batch)
        cases.append((given, pools_of(step), *run_eagerly(step, given)))
    torch.save(cases, tmp_path / "cases.pt")
    result = fresh_process(WITHOUT_THE_LIBRARY.format(saved=str(saved), cases=str(tmp_path / "cases.pt")))
    assert result.stdout.split() == ["right", "False", "False"], result.stdout + result.stderr


def test_no_pool_is_copied(saved):
    loaded = load_step(saved, window=4, aot_inductor=True)
    given, values, (expected, after) = named_case(loaded, batch=3)
    verify_inputs = [values[port["name"]] for port in loaded.verify.inputs]
    outputs = loaded.verify(*verify_inputs)
    values |= dict(zip((port["name"] for port in loaded.verify.outputs), outputs, strict=True))
    values["num_accepted"] = outputs[1]
    commit_inputs = [values[port["name"]] for port in loaded.commit.inputs]
    loaded.commit(*commit_inputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=False))
    assert_pools(values, after)
    smallest = min(x.nbytes for name, x in values.items() if "recurrent" in name or "conv" in name)
    for program, inputs in ((loaded.step, given), (loaded.verify, verify_inputs), (loaded.commit, commit_inputs)):
        program(*inputs)
        peak = peak_allocation(lambda p=program, i=inputs: p(*i), "cuda")
        assert peak < smallest, f"{program.name}: {peak} bytes beside a pool of {smallest}"


def test_a_cuda_graph_around_the_whole_step(saved):
    """Captured once, replayed for other windows, drafts and slots; the pools are the caller's."""
    package = torch._inductor.aoti_load_package(str(saved / "step.aoti.pt2"), run_single_threaded=True)
    step = large_step()
    pools = pools_of(step)
    package.load_constants(pools, check_full_update=False, user_managed=True)
    captured = CapturedStep(lambda *inputs: tuple(package(*inputs)))
    captured.capture(*inputs_on_gpu(3, seed=0))
    for name, pool in step.named_buffers():  # the runs before a capture advance the rows
        pools[name].copy_(pool)
    for seed in (1, 2, 3):
        given = inputs_on_gpu(3, seed)
        with torch.no_grad():
            expected = step(*given)
        results = captured(*given)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), seed
        assert_pools(pools, dict(step.named_buffers()))


def test_a_cuda_graph_around_both_halves(saved):
    """One graph of verify, then commit, of packages that each know only their half."""
    loaded = load_step(saved, aot_inductor=True, run_single_threaded=True)
    names = [port["name"] for port in loaded.step.inputs]
    step = large_step()
    pools = pools_of(step)

    def both(*inputs):
        values = dict(zip(names, inputs, strict=True)) | pools
        outputs = loaded.verify(*(values[port["name"]] for port in loaded.verify.inputs))
        values |= dict(zip((port["name"] for port in loaded.verify.outputs), outputs, strict=True))
        values["num_accepted"] = outputs[1]
        loaded.commit(*(values[port["name"]] for port in loaded.commit.inputs))
        return tuple(outputs[:2])

    captured = CapturedStep(both)
    captured.capture(*inputs_on_gpu(3, seed=0))
    for name, pool in step.named_buffers():
        pools[name].copy_(pool)
    for seed in (1, 2, 3):
        given = inputs_on_gpu(3, seed)
        with torch.no_grad():
            expected = step(*given)
        results = captured(*given)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), seed
        assert_pools(pools, dict(step.named_buffers()))

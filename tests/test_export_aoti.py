"""AOTInductor packages on the CPU: they run where this library is not installed, and update their pools in place."""

import shutil

import pytest
import torch
from exporting import SLOTS, export_small, pools_of, run_eagerly, small_step, step_inputs
from test_ops_export import fresh_process
from torch._dynamo.utils import ReinplaceCounters

from compile_passes import load_step
from models.memory import peak_allocation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and g++ is not installed"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The whole step with a dynamic batch and pools far larger than a window's temporaries, and the two halves."""
    exported = export_small(small_step(slots=40 * SLOTS), dynamic=True, portable=True)
    ReinplaceCounters.clear()
    with torch._inductor.config.patch(fx_graph_cache=False):
        directory = exported.save(tmp_path_factory.mktemp("aoti"), aot_inductor=("step", "verify", "commit"))
    return directory, ReinplaceCounters.get_total_missed()


def test_no_update_misses_its_place(saved):
    assert saved[1] == 0


def test_package_runs_without_the_library_for_every_batch(saved, tmp_path):
    cases = []
    for batch in (3, 2, 7):
        given = step_inputs(batch, seed=batch)
        expected, after = run_eagerly(small_step(slots=40 * SLOTS), given)
        cases.append((given, pools_of(small_step(slots=40 * SLOTS)), expected, after))
    torch.save(cases, tmp_path / "cases.pt")
    code = f"""
import sys, torch
package = torch._inductor.aoti_load_package({str(saved[0] / "step.aoti.pt2")!r})
metadata = package.loader.get_metadata()
assert (metadata["recoverssm.window"], metadata["recoverssm.program"]) == ("4", "step"), metadata
for given, before, expected, after in torch.load({str(tmp_path / "cases.pt")!r}):
    # The caller's tensors become the package's pools, so that the test can look at them.
    pools = {{name: pool.clone() for name, pool in before.items()}}
    package.load_constants(pools, check_full_update=False, user_managed=True)
    results = package(*given)
    assert all(torch.equal(x, y) for x, y in zip(results, expected))
    for name, pool in after.items():
        torch.testing.assert_close(pools[name], pool, rtol=1e-4, atol=1e-5)
    assert not torch.equal(pools["pools.recurrent_0"], before["pools.recurrent_0"])
print("right", *(name in sys.modules for name in ("recoverssm_ops", "compile_passes", "triton.runtime")))
"""
    result = fresh_process(code)
    assert result.stdout.split()[:3] == ["right", "False", "False"], result.stderr


def test_halves_as_packages_and_no_pool_is_copied(saved):
    loaded = load_step(saved[0], window=4, aot_inductor=True)
    given = step_inputs(5, seed=5)
    expected, after = run_eagerly(small_step(slots=40 * SLOTS), given)
    pools = pools_of(small_step(slots=40 * SLOTS))
    values = dict(zip((port["name"] for port in loaded.step.inputs), given, strict=True)) | pools
    verify_inputs = [values[port["name"]] for port in loaded.verify.inputs]
    before = {name: pool.clone() for name, pool in pools.items()}
    outputs = loaded.verify(*verify_inputs)
    assert all(torch.equal(pool, before[name]) for name, pool in pools.items())
    values |= dict(zip((port["name"] for port in loaded.verify.outputs), outputs, strict=True))
    commit_inputs = [(values | {"num_accepted": outputs[1]})[port["name"]] for port in loaded.commit.inputs]
    loaded.commit(*commit_inputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=False))
    for name, pool in after.items():
        torch.testing.assert_close(pools[name], pool, rtol=1e-4, atol=1e-5)

    smallest = min(pool.nbytes for name, pool in pools.items() if "recurrent" in name or "conv" in name)
    for program, inputs in ((loaded.step, given), (loaded.verify, verify_inputs), (loaded.commit, commit_inputs)):
        program(*inputs)
        assert peak_allocation(lambda p=program, i=inputs: p(*i), "cpu") < smallest, program.name

"""AOTInductor packages of a small step on CUDA, shared by tests, and what they are held against."""

from __future__ import annotations

from pathlib import Path

import torch
from exporting import SLOTS, export_small, pools_of, run_eagerly, small_step, step_inputs
from torch import Tensor

from compile_passes.exporting.load import LoadedStep

# Pools far larger than a window's temporaries: a copy of one would stand out.
MANY = 200 * SLOTS


def large_step() -> torch.nn.Module:
    return small_step(slots=MANY).cuda()


def save_packages(directory: Path, *, dynamic: bool) -> Path:
    exported = export_small(large_step(), dynamic=dynamic, triton=True, device="cuda")
    return exported.save(directory, aot_inductor=("step", "verify", "commit"))


def inputs_on_gpu(batch: int, seed: int) -> tuple[Tensor, ...]:
    return tuple(x.cuda() for x in step_inputs(batch, seed=seed))


def named_case(loaded: LoadedStep, batch: int, seed: int = 0):
    """Inputs, inputs and pools by name, and (results, pools) after an eager step of the model as it was written."""
    step, given = large_step(), inputs_on_gpu(batch, seed)
    values = dict(zip((port["name"] for port in loaded.step.inputs), given, strict=True)) | pools_of(step)
    return given, values, run_eagerly(step, given)


def assert_pools(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """As near as two float32 orders of the same sums are, one of them on the matrix unit in pieces."""
    for name, pool in expected.items():
        torch.testing.assert_close(found[name], pool, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")

"""Small steps to export, and a runner that feeds programs by the names in their manifest."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import torch
from test_pass_model import speculative_step
from torch import Tensor, nn

import recoverssm_ops as rs
from compile_passes import ExportedStep, export_step
from compile_passes.exporting import step as export
from compile_passes.exporting.graph import trace_step
from models.decode import example_inputs

SLOTS, T = 9, 4


def small_step(seed: int = 0, slots: int = SLOTS, **config) -> nn.Module:
    """One KDA layer and one full-attention layer, its pools filled with noise."""
    step = speculative_step(seed, slots=slots, num_layers=2, full_attn_period=2, **config)
    generator = torch.Generator().manual_seed(seed)
    for buffer in step.buffers():
        buffer.normal_(std=0.3, generator=generator)
    return step


def step_inputs(batch: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    """Windows at different positions whose forced drafts make every count of accepted tokens occur."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, 256, (batch, T), generator=generator)
    forced = torch.arange(batch) % T
    positions, slots = torch.arange(batch) * 2, torch.randperm(SLOTS, generator=generator)[:batch]
    noise = torch.rand(batch, T, generator=generator), torch.rand(batch, 256, generator=generator)
    return window, forced.clone(), forced, positions, slots, torch.zeros(batch), *noise


class Operators(nn.Module):
    """A model that calls the operators itself and asks for the state rather than committing it."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, pool, slots, q, k, v, g, beta, num_accepted):
        o, record = rs.kda_verify(q, k, v, g, beta, pool, slots, **self.options)
        return o, rs.kda_recover(pool[slots], record, num_accepted)


def export_small(
    step: nn.Module, *, dynamic: bool = False, device: str = "cpu", most: int = SLOTS, **options
) -> ExportedStep:
    """For batches of 3, or where dynamic of 2 to ``most``."""
    shapes = None
    inputs = example_inputs(3, T - 1, 256, device)
    if dynamic:
        batch = torch.export.Dim("batch", min=2, max=most)
        shapes = tuple({0: batch} for _ in inputs)
    return export_step(step, inputs, dynamic_shapes=shapes, **options)


@contextlib.contextmanager
def convolutions_replaced(replaced: bool = True) -> Iterator[None]:
    """Export as if pools were on CUDA, where the operators take the place of the model's short convolutions."""

    def trace(*args, convolutions: bool | None, **options):
        return trace_step(*args, convolutions=replaced if convolutions is None else convolutions, **options)

    with mock.patch.object(export, "trace_step", trace):
        yield


def run_eagerly(step: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Results and pools after a step of a copy."""
    step = copy.deepcopy(step)
    with torch.no_grad():
        results = step(*inputs)
    return results, dict(step.named_buffers())


def pools_of(step: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in step.named_buffers()}


def run_program(exported: ExportedStep, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs by name (new pools by the pool's); ``values`` holds at least the inputs."""
    described = exported.manifest.programs[name]
    outputs = getattr(exported, name).module()(*(values[port["name"]] for port in described["inputs"]))
    return {port["name"].removesuffix("_new"): x for port, x in zip(described["outputs"], outputs, strict=True)}


def named_inputs(exported: ExportedStep, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    ports = [port for port in exported.manifest.programs["step"]["inputs"] if port["role"] != "pool"]
    return {port["name"]: x for port, x in zip(ports, inputs, strict=True)}


def assert_same_step(results, pools: dict[str, Tensor], expected_results, expected_pools: dict[str, Tensor]) -> None:
    """Tokens exactly; states as near as two float32 orders of the same sums are."""
    for x, y in zip(results, expected_results, strict=True):
        assert torch.equal(x, y)
    assert pools.keys() == expected_pools.keys()
    for name, pool in pools.items():
        torch.testing.assert_close(pool, expected_pools[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

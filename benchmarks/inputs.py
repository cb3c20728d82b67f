"""Seeded inputs of one shape, as several sets with pools of their own, and the float64 truth of a few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.shapes import DTYPES, Shape
from recoverssm_ops.reference import recurrence


class Inputs:
    """``sets`` layers of one shape. Set i has the inputs ``q[i]``, ... and the pool ``states[i]``.

    The pools ``[B + 1, HV, V, K]`` have the null slot 0 that the peers expect; every set uses the same permuted ``slots``.
    ``accepted`` is read on the device, so that a captured graph serves every length.
    """

    def __init__(self, shape: Shape, sets: int, device: str, seed: int = 0) -> None:
        self.shape, self.sets, self.device = shape, sets, device
        generator = torch.Generator(device).manual_seed(seed)
        B, T, D, H, HV = shape.batch, shape.window, shape.head_size, shape.heads, shape.num_value_heads

        def normal(*size: int, dtype: torch.dtype = DTYPES[shape.dtype]) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

        gate = (HV,) if shape.scalar_gate else (HV, D)

        def of_each_set(*size: int) -> list[Tensor]:
            # Allocations of their own: part of one tensor would not always begin at a multiple of 16 bytes.
            return [normal(*size) for _ in range(sets)]

        self.q, self.k = of_each_set(B, T, H, D), of_each_set(B, T, H, D)
        self.v, self.g, self.beta = of_each_set(B, T, HV, D), of_each_set(B, T, *gate), of_each_set(B, T, HV)
        self.A_log = 0.5 * normal(HV, dtype=torch.float32)
        self.dt_bias = 0.5 * normal(*gate, dtype=torch.float32)
        pool = normal(sets, B + 1, HV, D, D, dtype=DTYPES[shape.state_dtype])
        self.states = list(pool.unbind())
        self.slots = (1 + torch.randperm(B, generator=generator, device=device)).to(torch.int32)
        self.cu_seqlens = torch.arange(0, B * T + 1, T, device=device, dtype=torch.int32)
        self.accepted = torch.full((B,), T, device=device, dtype=torch.int32)
        self.scale = D**-0.5
        self._oracle_parts()

    def _oracle_parts(self) -> None:
        """First and last row, first and last key head: the oracle is a loop over heads and tokens."""
        shape, groups = self.shape, self.shape.num_value_heads // self.shape.heads
        self.rows = torch.tensor(sorted({0, shape.batch - 1}), device=self.device)
        self.key_heads = sorted({0, shape.heads - 1})
        self.heads = [h * groups + i for h in self.key_heads for i in range(groups)]
        self.initial = self.states[0][self.slots[self.rows].long()].clone()

    def reset(self) -> None:
        """Undo what commits did to the checked rows of set 0."""
        self.states[0][self.slots[self.rows].long()] = self.initial

    def checked(self, x: Tensor) -> Tensor:
        """The part of ``[B, T, HV, ..]`` outputs that :meth:`oracle` gives: ``[rows, T, heads, ..]``."""
        return x[self.rows][:, :, self.heads].double().cpu()

    def checked_states(self, states: Tensor) -> Tensor:
        """The part of ``[rows, HV, V, K]`` states that :meth:`oracle` gives."""
        return states[:, self.heads].double().cpu()

    def oracle(self) -> tuple[Tensor, Tensor, Tensor]:
        """``o``, ``u`` ``[rows, T, heads, V]`` and ``states [rows, T + 1, heads, V, K]`` of set 0 in float64."""
        results = []
        for at, row in enumerate(self.rows.tolist()):
            q, k = (x[0][row][:, self.key_heads].cpu() for x in (self.q, self.k))
            v, g, beta = (x[0][row][:, self.heads].cpu() for x in (self.v, self.g, self.beta))
            results.append(
                recurrence(
                    q, k, v, g, beta, self.initial[at][self.heads].cpu(),
                    A_log=self.A_log[self.heads].cpu(), dt_bias=self.dt_bias[self.heads].cpu(),
                    lower_bound=self.shape.lower_bound, scale=self.scale, use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                )
            )  # fmt: skip
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def relative_error(actual: Tensor, oracle: Tensor) -> float:
    """Frobenius norm of the difference over that of the oracle."""
    return ((actual - oracle).norm() / oracle.norm()).item()

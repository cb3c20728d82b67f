"""Ours, its portable form, and the plain path that keeps a state per token: one class each, with one interface.

A provider runs set i of its :class:`~benchmarks.inputs.Inputs`: ``verify(i)`` leaves ``o[i]`` (and ``u[i]``, where it makes
one), ``commit(i)`` advances the states by ``inputs.accepted``, ``commit_all()`` those of every set.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import recoverssm_ops as rs
from benchmarks.floors import commit_bytes, materialised_bytes, verify_bytes
from benchmarks.inputs import Inputs
from benchmarks.shapes import Shape
from recoverssm_ops import portable


class Unsupported(Exception):
    """The provider cannot run the shape; the message says why."""


class Provider:
    """What the others have in common. ``operations`` names what can be timed."""

    operations: tuple[str, ...] = ("verify", "commit", "step")

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.check(inputs.shape)
        self.o: list[Tensor | None] = [None] * inputs.sets
        self.u: list[Tensor | None] = [None] * inputs.sets

    @staticmethod
    def check(shape: Shape) -> None:
        """Raise :class:`Unsupported` for a shape that cannot run."""

    def verify(self, i: int) -> None:
        raise NotImplementedError

    def commit(self, i: int) -> None:
        raise NotImplementedError

    def commit_all(self) -> None:
        for i in range(self.inputs.sets):
            self.commit(i)

    def reset(self) -> None:
        self.inputs.reset()

    def corrections(self) -> Tensor | None:
        """``[B, T, HV, V]`` of set 0."""
        return self.u[0]

    def committed(self) -> Tensor:
        """States of the checked rows of set 0, ``[rows, HV, V, K]``."""
        x = self.inputs
        return x.states[0][x.slots[x.rows].long()]

    def bytes_moved(self, operation: str, accepted: int) -> int:
        shape = self.inputs.shape
        moved = {"verify": verify_bytes(shape), "commit": commit_bytes(shape, accepted)}
        return sum(moved.values()) if operation == "step" else moved[operation]


class RecoverSSM(Provider):
    """The public functions, a launch per layer."""

    name = "recoverssm"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.records: list[rs.Record | None] = [None] * inputs.sets

    def verify(self, i: int) -> None:
        x = self.inputs
        self.o[i], self.records[i] = rs.kda_verify(
            x.q[i], x.k[i], x.v[i], x.g[i], x.beta[i], x.states[i], x.slots,
            A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=x.shape.lower_bound, scale=x.scale,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, pad_slot_id=0,
        )  # fmt: skip
        self.u[i] = self.records[i].u

    def _record(self, i: int) -> rs.Record:
        """A record is consumed once; a benchmark commits the same one again and again."""
        return dataclasses.replace(self.records[i], committed=False)

    def commit(self, i: int) -> None:
        x = self.inputs
        rs.kda_commit(x.states[i], self._record(i), x.accepted, x.slots, pad_slot_id=0)


class RecoverSSMMerged(RecoverSSM):
    """The same, with the commits of all layers in one launch: differs in ``step`` alone."""

    name = "recoverssm-merged"
    operations = ("step",)

    def commit_all(self) -> None:
        x = self.inputs
        rs.kda_commit_layers(x.states, [self._record(i) for i in range(x.sets)], x.accepted, x.slots, pad_slot_id=0)


class Portable(Provider):
    """The ATen form of the operators, eager."""

    name = "portable"
    compiled = False

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self._verify, self._commit = portable.verify, portable.commit
        if self.compiled:
            self._verify, self._commit = (
                torch.compile(f, dynamic=False, fullgraph=True) for f in (portable.verify, portable.commit)
            )

    def _gate(self) -> tuple:
        x = self.inputs
        return x.A_log, x.dt_bias, x.shape.lower_bound or 0.0

    def verify(self, i: int) -> None:
        x = self.inputs
        layout = (x.states[i], x.slots, None, x.shape.window)
        data = (x.q[i], x.k[i], x.v[i], x.g[i], x.beta[i])
        self.o[i], self.u[i] = self._verify(*data, *layout, *self._gate(), x.scale, True, True, True, False, 0)

    def commit(self, i: int) -> None:
        x = self.inputs
        plan = (x.slots, x.slots[:, None], x.accepted[:, None])
        record = (x.states[i], self.u[i], x.k[i], x.g[i])
        self._commit(*record, *plan, None, x.shape.window, *self._gate(), True, True, 0)


class PortableCompiled(Portable):
    """The ATen form through Inductor."""

    name = "portable-compiled"
    compiled = True


def plain_window(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs ``[B, T, HV, V]`` and the states after every token ``[B, T, HV, V, K]`` in the pool's dtype."""
    groups, dtype = v.shape[2] // k.shape[2], v.dtype

    def unit(x: Tensor) -> Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(groups, 2)

    q, k, v, beta = unit(q) * scale, unit(k), v.float(), torch.sigmoid(beta.float())
    scalar = g.ndim == 3
    gate = g.float() + dt_bias
    rate = A_log.exp() if scalar else A_log.exp()[:, None]
    bounded = lower_bound is not None
    gate = lower_bound * torch.sigmoid(rate * gate) if bounded else -rate * torch.nn.functional.softplus(gate)
    decay = gate.exp()[..., None, None] if scalar else gate.exp()[..., None, :]
    S = pool[slots].float()
    outputs, states = [], []
    for t in range(q.shape[1]):
        S = S * decay[:, t]
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, None, :]).sum(-1))
        S = S + u[..., None] * k[:, t, :, None, :]
        outputs.append((S * q[:, t, :, None, :]).sum(-1))
        states.append(S.to(pool.dtype))
    return torch.stack(outputs, 1).to(dtype), torch.stack(states, 1)


def plain_commit(pool: Tensor, states: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """The selected state goes back to the pool."""
    pool[slots] = states[torch.arange(slots.shape[0], device=slots.device), accepted - 1]


class Plain(Provider):
    """What a model without RecoverSSM does: the recurrence token by token, T states a row, through Inductor."""

    name = "plain"

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.window = torch.compile(plain_window, dynamic=False, fullgraph=True)
        self.select = torch.compile(plain_commit, dynamic=False, fullgraph=True)
        self.states: list[Tensor | None] = [None] * inputs.sets

    def verify(self, i: int) -> None:
        x = self.inputs
        gate = (x.A_log, x.dt_bias, x.shape.lower_bound, x.scale)
        data = (x.q[i], x.k[i], x.v[i], x.g[i], x.beta[i])
        self.o[i], self.states[i] = self.window(*data, x.states[i], x.slots, *gate)

    def commit(self, i: int) -> None:
        x = self.inputs
        self.select(x.states[i], self.states[i], x.slots, x.accepted)

    def bytes_moved(self, operation: str, accepted: int) -> int:
        shape = self.inputs.shape
        moved = {"verify": materialised_bytes(shape), "commit": 2 * shape.state_bytes}
        return sum(moved.values()) if operation == "step" else moved[operation]


OURS = {c.name: c for c in (RecoverSSM, RecoverSSMMerged, Portable, PortableCompiled, Plain)}

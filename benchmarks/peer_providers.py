"""The peers' kernels as providers: vLLM's RecoverSSM, vLLM's path with a state per token, FlashInfer's verify."""

from __future__ import annotations

import os
import types

import torch

from benchmarks.floors import materialised_bytes
from benchmarks.inputs import Inputs
from benchmarks.peers import Peers
from benchmarks.providers import Provider, Unsupported
from benchmarks.shapes import Shape


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[B, T, ..]`` as the packed ``[1, B * T, ..]``."""
    return x.reshape(1, -1, *x.shape[2:])


def _check_kda(shape: Shape) -> None:
    if shape.scalar_gate:
        raise Unsupported("no scalar gate")
    if shape.num_value_heads != shape.heads:
        raise Unsupported("as many value heads as key heads only")


class _Peer(Provider):
    """Outputs are allocated beforehand, as the peers' callers do."""

    def __init__(self, inputs: Inputs, peers: Peers) -> None:
        if torch.device(inputs.device).type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("CUDA only")
        super().__init__(inputs)
        self.peers = peers
        self.o = [torch.empty_like(v) for v in inputs.v]

    def _window(self, i: int) -> tuple:
        x = self.inputs
        data = (_flat(t[i]) for t in (x.q, x.k, x.v, x.g, x.beta))
        return (*data, x.A_log, x.dt_bias.view(-1), x.shape.lower_bound)


class VLLM(_Peer):
    """RecoverSSM in Triton. A commit is three launches: the plan, a convolution of one channel, the states of all layers."""

    name = "vllm"

    def __init__(self, inputs: Inputs, peers: Peers) -> None:
        super().__init__(inputs, peers)
        shape, device = inputs.shape, torch.device(inputs.device)
        sizes = (shape.batch, shape.heads, shape.window, shape.head_size)
        allocate = peers.vllm.KDARecoverSSMRecords.allocate
        self.records = [allocate(*sizes, inputs.q[0].dtype, device) for _ in range(inputs.sets)]
        # The convolution's history belongs to the peer's commit; one channel makes its share negligible.
        history = torch.zeros(inputs.sets, shape.batch + 1, 1, shape.window + 2, dtype=inputs.q[0].dtype, device=device)
        self.layers = [
            types.SimpleNamespace(
                kv_cache=(history[i], inputs.states[i]),
                recoverssm_records=self.records[i],
                A_log=inputs.A_log,
                dt_bias=inputs.dt_bias.view(-1),
                local_num_heads=shape.heads,
                head_dim=shape.head_size,
                gate_lower_bound=shape.lower_bound,
            )
            for i in range(inputs.sets)
        ]
        self.contexts = [self._context([layer]) for layer in self.layers]
        self.all_layers = self._context(self.layers)

    def _context(self, layers: list) -> object:
        shape = self.inputs.shape
        create = self.peers.vllm.KDARecoverSSMCommitContext.create
        return create(layers, spec_query_len=shape.window, max_num_reqs=shape.batch)

    @staticmethod
    def check(shape: Shape) -> None:
        _check_kda(shape)

    def verify(self, i: int) -> None:
        x = self.inputs
        self.peers.vllm.kda_recoverssm_verify(
            *self._window(i), x.states[i], self.records[i], x.cu_seqlens, x.slots, x.shape.window, _flat(self.o[i])
        )

    def corrections(self) -> torch.Tensor:
        return self.records[0].correction.transpose(1, 2)

    def commit(self, i: int) -> None:
        x = self.inputs
        self.contexts[i].commit(x.accepted, x.slots, x.cu_seqlens)

    def commit_all(self) -> None:
        x = self.inputs
        self.all_layers.commit(x.accepted, x.slots, x.cu_seqlens)

    def bytes_moved(self, operation: str, accepted: int) -> int:
        shape = self.inputs.shape
        copies = shape.batch * shape.window * shape.heads * 2 * shape.head_size * self.inputs.q[0].element_size()
        return super().bytes_moved(operation, accepted) + (0 if operation == "commit" else copies)


class VLLMNative(_Peer):
    """vLLM's path without RecoverSSM: T slots a request, the next step starts from the accepted one. Nothing to commit."""

    name = "vllm-native"
    operations = ("verify", "step")

    def __init__(self, inputs: Inputs, peers: Peers) -> None:
        super().__init__(inputs, peers)
        shape, device = inputs.shape, inputs.device
        B, T = shape.batch, shape.window
        matrix = inputs.states[0].shape[1:]
        pool = torch.empty(inputs.sets, B * T + 1, *matrix, dtype=inputs.states[0].dtype, device=device).normal_()
        self.pools = list(pool.unbind())
        order = 1 + torch.randperm(B * T, device=device)
        self.slots = order.view(B, T).to(torch.int32)
        self.first = torch.ones(B, dtype=torch.int32, device=device)

    @staticmethod
    def check(shape: Shape) -> None:
        _check_kda(shape)

    def reset(self) -> None:
        self.pools[0][self.slots[self.inputs.rows, 0].long()] = self.inputs.initial

    def verify(self, i: int) -> None:
        x = self.inputs
        self.peers.native.fused_recurrent_kda(
            *self._window(i), self.pools[i], x.cu_seqlens, self.slots, self.first, _flat(self.o[i])
        )

    def commit(self, i: int) -> None:
        """The scheduler's bookkeeping picks the slot."""

    def corrections(self) -> None:
        return None

    def committed(self) -> torch.Tensor:
        rows = self.inputs.rows
        column = self.inputs.accepted[rows].long() - 1
        return self.pools[0][self.slots[rows].gather(1, column[:, None])[:, 0].long()]

    def bytes_moved(self, operation: str, accepted: int) -> int:
        return materialised_bytes(self.inputs.shape)


class FlashInfer(_Peer):
    """FlashInfer's window-parallel verify; the commit that goes with it is vLLM's."""

    name = "flashinfer"
    operations = ("verify",)

    def __init__(self, inputs: Inputs, peers: Peers) -> None:
        super().__init__(inputs, peers)
        shape = inputs.shape
        size = (inputs.sets, shape.batch + 1, shape.heads, shape.window)
        self.correction = torch.empty(*size, shape.head_size, dtype=torch.float32, device=inputs.device)
        self.key_gate = torch.empty(*size, 2 * shape.head_size, dtype=inputs.q[0].dtype, device=inputs.device)

    @staticmethod
    def check(shape: Shape) -> None:
        _check_kda(shape)
        if shape.state_dtype != "bf16" or shape.dtype != "bf16":
            raise Unsupported("bf16 pools and inputs only")
        if shape.head_size != 128:
            raise Unsupported("head size 128 only")

    def verify(self, i: int) -> None:
        x = self.inputs
        self.peers.flashinfer(
            *self._window(i), x.states[i], self.correction[i], self.key_gate[i], x.cu_seqlens, x.slots, x.shape.window,
            _flat(self.o[i]),
        )  # fmt: skip

    def corrections(self) -> torch.Tensor:
        return self.correction[0][self.inputs.slots.long()].transpose(1, 2)

    def bytes_moved(self, operation: str, accepted: int) -> int:
        shape = self.inputs.shape
        copies = shape.batch * shape.window * shape.heads * 2 * shape.head_size * 2
        return super().bytes_moved(operation, accepted) + copies


PEERS = {c.name: c for c in (VLLM, VLLMNative, FlashInfer)}

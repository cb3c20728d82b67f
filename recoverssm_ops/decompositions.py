"""The operators as functions of plain ATen, for runtimes that know no custom operator.

They are the algorithms of ``portable.py``, which are the CPU kernels, too: a program exported through them computes what the
operators compute on the CPU, without this library.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.export import ExportedProgram

from recoverssm_ops import conv_ops, layers_ops, ops, portable, portable_conv


def _commit_layers(states, u, k, g, source, dest, length, cu_seqlens, max_seqlen, A_log, dt_bias, *settings) -> None:
    for layer, state in enumerate(states):
        gate = (layers_ops.of_layer(A_log, layer), layers_ops.of_layer(dt_bias, layer))
        record = (u[layer], k[layer], g[layer])
        portable.commit(state, *record, source, dest, length, cu_seqlens, max_seqlen, *gate, *settings)


def _conv_commit_layers(conv_states: list[Tensor], xs: list[Tensor], *plan_and_settings) -> None:
    for conv_state, x in zip(conv_states, xs, strict=True):
        portable_conv.commit(conv_state, x, *plan_and_settings)


# These return something and change nothing: they can stand in a table of decompositions.
PURE = {
    ops.kda_verify: portable.verify,
    ops.kda_recover: portable.recover,
    conv_ops.causal_conv1d_verify: portable_conv.verify,
}
# These update a pool. A program has to be traced through them (compile_passes.export_step with portable=True does).
MUTATING = {
    ops.kda_commit: portable.commit,
    conv_ops.causal_conv1d_commit: portable_conv.commit,
    layers_ops.kda_commit_layers: _commit_layers,
    layers_ops.causal_conv1d_commit_layers: _conv_commit_layers,
}
PORTABLE = {**PURE, **MUTATING}


def _running(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A scan along a window as one operation a token: some runtimes have no scans, and windows are short."""

    def scan(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        total, totals = None, []
        for piece in (x if dtype is None else x.to(dtype)).unbind(dim):
            total = piece if total is None else combine(total, piece)
            totals.append(total)
        return torch.stack(totals, dim)

    return scan


running_sum, running_product = _running(operator.add), _running(operator.mul)


def without_mutation(program: ExportedProgram, table: dict, runtime: str) -> ExportedProgram:
    """The program decomposed by ``table``. Raises ValueError if it updates a pool in place, which ``runtime`` cannot."""
    program = program.run_decompositions(table)
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if mutated or any(node.args and node.args[0] in MUTATING for node in program.graph.nodes):
        what = f"updates {', '.join(mutated)} in place" if mutated else "calls a commit operator"
        raise ValueError(
            f"the program {what}, and {runtime} has no mutation: export it with compile_passes.export_step(..., "
            "functional=True, portable=True), which takes pools as inputs and returns their new contents, or use "
            "kda_recover in place of kda_commit"
        )
    return program

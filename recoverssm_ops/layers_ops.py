"""``torch.ops.recoverssm.*_commit_layers``: the commits of every layer of a step as one operator, by the rules of ``ops.py``.

Lists of pools, against the rule that raw operators take no lists, and not one pool with a layer dimension: pools need no
common storage, and each element of a mutated list is re-inplaced for itself, so that no pool is cloned (docs/design.md,
section 4, says what was tried). An empty list of gate parameters stands for None. A runtime that takes no list arguments needs
the commit of each layer.
"""

import torch
from torch import Tensor

from recoverssm_ops import portable, portable_conv
from recoverssm_ops.lazy_triton import launchers

SCHEMAS = (
    "kda_commit_layers(Tensor(a!)[] states, Tensor[] u, Tensor[] k, Tensor[] g, Tensor source, Tensor dest, Tensor length, "
    "Tensor? cu_seqlens, int max_seqlen, Tensor[] A_log, Tensor[] dt_bias, float lower_bound, "
    "bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, int pad_slot_id) -> ()",
    "causal_conv1d_commit_layers(Tensor(a!)[] conv_states, Tensor[] xs, Tensor source, Tensor dest, Tensor length, "
    "Tensor? cu_seqlens, int pad_slot_id) -> ()",
)

_library = torch.library.Library("recoverssm", "FRAGMENT")
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

kda_commit_layers = torch.ops.recoverssm.kda_commit_layers.default
causal_conv1d_commit_layers = torch.ops.recoverssm.causal_conv1d_commit_layers.default


@torch.library.register_fake("recoverssm::kda_commit_layers", lib=_library)
def _commit_layers_fake(states, *records_and_plan):
    return None


@torch.library.register_fake("recoverssm::causal_conv1d_commit_layers", lib=_library)
def _conv_commit_layers_fake(conv_states, *inputs_and_plan):
    return None


def of_layer(parameters: list[Tensor], layer: int) -> Tensor | None:
    return parameters[layer] if parameters else None


def _commit_layers_cpu(
    states, u, k, g, source, dest, length, cu_seqlens, max_seqlen, A_log, dt_bias, *settings
) -> None:
    with torch.autocast("cpu", enabled=False):
        for layer, state in enumerate(states):
            record = (u[layer], k[layer], g[layer])
            gate = (of_layer(A_log, layer), of_layer(dt_bias, layer))
            portable.commit(state, *record, source, dest, length, cu_seqlens, max_seqlen, *gate, *settings)


def _conv_commit_layers_cpu(conv_states, xs, *plan_and_settings) -> None:
    for conv_state, x in zip(conv_states, xs, strict=True):
        portable_conv.commit(conv_state, x, *plan_and_settings)


_library.impl("kda_commit_layers", _commit_layers_cpu, "CPU")
_library.impl("causal_conv1d_commit_layers", _conv_commit_layers_cpu, "CPU")
_library.impl("kda_commit_layers", lambda *args: launchers("launch_layers").commit(*args), "CUDA")
_library.impl("causal_conv1d_commit_layers", lambda *args: launchers("launch_layers").conv_commit(*args), "CUDA")

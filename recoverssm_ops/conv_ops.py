"""``torch.ops.recoverssm.causal_conv1d_*``: schemas, fakes and kernels, by the rules of ``ops.py``.

The raw commit takes no ``max_seqlen``: a history is W-1 columns, wherever the row ends.
"""

import torch
from torch import Tensor

from recoverssm_ops import portable_conv
from recoverssm_ops.lazy_triton import launchers

SCHEMAS = (
    "causal_conv1d_verify(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor? conv_state_indices, "
    "Tensor? cu_seqlens, int max_seqlen, bool silu, int pad_slot_id) -> Tensor",
    "causal_conv1d_commit(Tensor(a!) conv_state, Tensor x, Tensor source, Tensor dest, Tensor length, "
    "Tensor? cu_seqlens, int pad_slot_id) -> ()",
)

_library = torch.library.Library("recoverssm", "FRAGMENT")
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

causal_conv1d_verify = torch.ops.recoverssm.causal_conv1d_verify.default
causal_conv1d_commit = torch.ops.recoverssm.causal_conv1d_commit.default


@torch.library.register_fake("recoverssm::causal_conv1d_verify", lib=_library)
def _verify_fake(x, *weights_and_history):
    return x.new_empty(x.shape)


@torch.library.register_fake("recoverssm::causal_conv1d_commit", lib=_library)
def _commit_fake(conv_state, *inputs_and_plan):
    return None


def _verify_cpu(x, *rest) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(x.shape)
    return portable_conv.verify(x, *rest)


_library.impl("causal_conv1d_verify", _verify_cpu, "CPU")
_library.impl("causal_conv1d_commit", portable_conv.commit, "CPU")
_library.impl("causal_conv1d_verify", lambda *args: launchers("launch_conv").verify(*args), "CUDA")
_library.impl("causal_conv1d_commit", lambda *args: launchers("launch_conv").commit(*args), "CUDA")

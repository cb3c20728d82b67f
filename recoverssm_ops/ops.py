"""``torch.ops.recoverssm``: schemas, fakes and kernels side by side, because they change together.

``Library.define`` and ``impl`` cost about 2 µs a call where ``custom_op`` costs about 15. The raw operators are positional,
without defaults, lists or optional outputs; the friendly functions of ``kda.py`` check the inputs and wrap them. A released
schema is frozen: it is not part of the compile caches' key, so a change needs a new name. ``lower_bound = 0`` stands for the
unbounded gate (a bound is negative), because ``float?`` does not survive every runtime.
"""

import torch
from torch import Tensor

from recoverssm_ops import portable
from recoverssm_ops.lazy_triton import launchers

_WINDOW = "Tensor? cu_seqlens, int max_seqlen"
_GATE = "Tensor? A_log, Tensor? dt_bias, float lower_bound"
SCHEMAS = (
    f"kda_verify(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor? state_indices, {_WINDOW}, "
    f"{_GATE}, float scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, int pad_slot_id) -> (Tensor, Tensor)",
    "kda_commit(Tensor(a!) state, Tensor u, Tensor k, Tensor g, Tensor source, Tensor dest, Tensor length, "
    f"{_WINDOW}, {_GATE}, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, int pad_slot_id) -> ()",
    f"kda_recover(Tensor initial_state, Tensor u, Tensor k, Tensor g, Tensor num_accepted, {_WINDOW}, {_GATE}, "
    "bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel) -> Tensor",
)

_library = torch.library.Library("recoverssm", "DEF")
for _schema in SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

kda_verify = torch.ops.recoverssm.kda_verify.default
kda_commit = torch.ops.recoverssm.kda_commit.default
kda_recover = torch.ops.recoverssm.kda_recover.default


@torch.library.register_fake("recoverssm::kda_verify", lib=_library)
def _verify_fake(q, k, v, g, beta, state, *settings):
    return v.new_empty(v.shape), v.new_empty(v.shape, dtype=torch.float32)


@torch.library.register_fake("recoverssm::kda_commit", lib=_library)
def _commit_fake(state, *record_and_plan):
    return None


@torch.library.register_fake("recoverssm::kda_recover", lib=_library)
def _recover_fake(initial_state, *record):
    return initial_state.new_empty(initial_state.shape, dtype=torch.float32)


def _verify_cpu(q, k, v, *rest) -> tuple[Tensor, Tensor]:
    if v.numel() == 0 or k.numel() == 0:
        return v.new_zeros(v.shape), v.new_zeros(v.shape, dtype=torch.float32)
    return portable.verify(q, k, v, *rest)


def _recover_cpu(initial_state, *record) -> Tensor:
    if initial_state.numel() == 0:
        return initial_state.new_empty(initial_state.shape, dtype=torch.float32)
    return portable.recover(initial_state, *record).contiguous()


def _without_autocast(kernel):
    """Autocast stays on inside a kernel, and would run the portable form's products in low precision."""

    def call(*args):
        if not torch.is_autocast_enabled("cpu"):
            return kernel(*args)
        with torch.autocast("cpu", enabled=False):
            return kernel(*args)

    return call


_library.impl("kda_verify", _without_autocast(_verify_cpu), "CPU")
_library.impl("kda_commit", _without_autocast(portable.commit), "CPU")
_library.impl("kda_recover", _without_autocast(_recover_cpu), "CPU")
_library.impl("kda_verify", lambda *args: launchers("launch").verify(*args), "CUDA")
_library.impl("kda_commit", lambda *args: launchers("launch").commit(*args), "CUDA")
_library.impl("kda_recover", lambda *args: launchers("launch").recover(*args), "CUDA")

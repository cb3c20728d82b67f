"""The record of a verified window: what commit needs to rebuild the state at the accepted position."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class Record:
    """Compact record of one verified window, made by :func:`recoverssm_ops.kda_verify`.

    ``k`` and ``g`` are the very tensors that verify received, not copies: the record costs ``u`` and nothing else. Keep them
    unchanged until the commit. The gate's parameters travel with the record so that commit cannot use others.

    Attributes:
        u: the corrections, ``[B, T, HV, V]`` float32 (packed: ``[1, N, HV, V]``).
        k: raw keys ``[B, T, H, K]``; g: raw gate ``[B, T, HV, K]`` or ``[B, T, HV]``.
        A_log, dt_bias, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel: as given to verify.
        cu_seqlens, max_seqlen: the packed layout (``cu_seqlens`` is None for dense windows); ``max_seqlen`` is T.
        committed: set by commit; a record is consumed once.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int
    lower_bound: float | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    committed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the record keeps alive."""
        return sum(x.numel() * x.element_size() for x in (self.u, self.k, self.g))


_TENSORS = ("u", "k", "g", "A_log", "dt_bias", "cu_seqlens")
# ``committed`` is one of them: a copy made by a tree map must not be committed a second time.
_SETTINGS = tuple(f.name for f in fields(Record) if f.name not in _TENSORS)


def _flatten(record: Record) -> tuple[list[Tensor | None], tuple]:
    return [getattr(record, name) for name in _TENSORS], tuple(getattr(record, name) for name in _SETTINGS)


def _flatten_with_keys(record: Record) -> tuple[list, tuple]:
    tensors, settings = _flatten(record)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(_TENSORS, tensors, strict=True)], settings


def _unflatten(tensors, settings) -> Record:
    return Record(**dict(zip(_TENSORS, tensors, strict=True)), **dict(zip(_SETTINGS, settings, strict=True)))


# Exported programs and compiled regions may take and return records.
pytree.register_pytree_node(
    Record,
    _flatten,
    _unflatten,
    serialized_type_name="recoverssm_ops.Record",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([Record])

"""What a layer does to its raw inputs before the recurrence: decay gate, L2 norm, step size.

Verify and commit both call these functions. A second spelling of the gate in commit would leave the outputs right and let the
state drift unseen, so there is none. Formulas: docs/design.md, section 2. Everything is float32.
"""

import torch
from torch import Tensor

L2NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def log_decay(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, use_gate_in_kernel: bool
) -> Tensor:
    """Log decay per token, float32, as ``[..., HV, K]`` (KDA) or ``[..., HV, 1]`` (scalar gate).

    ``g`` arrives with the trailing axis already present, ``A_log`` as ``[HV]``, ``dt_bias`` as ``[HV, K]`` or ``[HV, 1]``.
    ``lower_bound == 0`` selects the unbounded softplus gate.
    """
    g = g.float()
    if not use_gate_in_kernel:
        return g
    if dt_bias is not None:
        g = g + dt_bias.float()
    rate = 1.0 if A_log is None else A_log.float().exp().unsqueeze(-1)
    if lower_bound != 0:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * torch.nn.functional.softplus(g, threshold=SOFTPLUS_THRESHOLD)


def unit_rows(x: Tensor, use_qk_l2norm_in_kernel: bool) -> Tensor:
    """``x / |x|`` over the last axis in float32, or ``x`` in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) if use_qk_l2norm_in_kernel else x


def step_size(beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """The delta rule's step size in float32: in (0, 1), or in (0, 2) where negative eigenvalues are allowed."""
    beta = beta.float()
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
    return 2 * beta if allow_neg_eigval else beta

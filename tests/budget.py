"""The one tolerance of the numerical tests (docs/design.md, section 2): no test picks its own ``atol``."""

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
LOW_PRECISION = (torch.bfloat16, torch.float16)


def verify_slack(state: Tensor) -> float:
    """What ``verify`` may add to the errors of o and u on a GPU.

    Its kernel keeps 16 bits where the pool itself has 8; and the matrix unit truncates as it accumulates, once for every few of
    the K terms of a sum.
    """
    if not state.is_cuda:
        return 0.0
    return 2.0**-15 if state.dtype == torch.bfloat16 else EPS32 * state.shape[-1] / 128


def relative_error(actual: Tensor, oracle64: Tensor) -> float:
    """Frobenius norm of the difference over that of the oracle; the plain norm where the oracle is zero."""
    actual, oracle64 = actual.detach().double().cpu(), oracle64.detach().double().cpu()
    norm = oracle64.norm().item()
    return (actual - oracle64).norm().item() / (norm or 1.0)


def assert_within_budget(
    actual: Tensor,
    oracle64: Tensor,
    low32: Tensor,
    dtype: torch.dtype | None = None,
    name: str = "",
    *,
    slack: float = 0.0,
) -> None:
    """Fail unless ``actual`` is about as near to the oracle as the token-by-token recurrence in float32 is.

    Args:
        actual: what is tested.
        oracle64: the float64 recurrence's result, same shape.
        low32: the float32 recurrence's result on the same inputs, same shape.
        dtype: what the result was rounded to, where that is not ``actual.dtype`` (a bf16 pool returned as float32).
        name: shown in the message.
        slack: an additional relative error, for the rare case that argues for one where it uses it.

    The budget is twice the error of ``low32``, plus a rounding band: 4 float32 epsilons, and 2 epsilons of a low
    precision ``dtype``. NaN and infinity fail.
    """
    label = name or "result"
    assert oracle64.dtype == torch.float64, f"{label}: the oracle is {oracle64.dtype}, not float64"
    assert actual.shape == oracle64.shape == low32.shape, (
        f"{label}: shapes differ: actual {list(actual.shape)}, oracle {list(oracle64.shape)}, low {list(low32.shape)}"
    )
    assert oracle64.isfinite().all() and low32.isfinite().all(), f"{label}: the references themselves are not finite"
    not_finite = int((~actual.isfinite()).sum())
    assert not_finite == 0, f"{label}: {not_finite} of {actual.numel()} elements are not finite"
    dtype = actual.dtype if dtype is None else dtype
    band = 4 * EPS32 + (2 * torch.finfo(dtype).eps if dtype in LOW_PRECISION else 0.0) + slack
    error, sequential = relative_error(actual, oracle64), relative_error(low32, oracle64)
    budget = 2 * sequential + band
    assert error <= budget, (
        f"{label}: relative error {error:.3e} exceeds {budget:.3e} "
        f"(float32 recurrence {sequential:.3e}, rounding band {band:.3e})"
    )

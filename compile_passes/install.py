"""Install the pass for a while, beside whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor import config

from compile_passes.recover_pass import RecoverSSMPass

SLOT = "post_grad_custom_pre_pass"


@contextmanager
def recoverssm_passes(
    *, merge_layers: bool | None = None, check: bool = False, convolutions: bool | None = None
) -> Iterator[RecoverSSMPass]:
    """Append :class:`RecoverSSMPass` to the post-grad passes, and restore the configuration afterwards.

    A pass that another library installed keeps running, before ours. ``torch.compile`` is lazy: the first call of the
    compiled function has to happen inside the context::

        with recoverssm_passes():
            step = torch.compile(step)
            step(*args)

    Args:
        merge_layers, check, convolutions: options of :class:`RecoverSSMPass`.
    """
    added = RecoverSSMPass(
        then=getattr(config, SLOT), merge_layers=merge_layers, check=check, convolutions=convolutions
    )
    with config.patch({SLOT: added}):
        yield added

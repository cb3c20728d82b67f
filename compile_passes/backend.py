"""``torch.compile(model, backend="recoverssm")``: Inductor with the pass."""

from __future__ import annotations

from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from compile_passes.install import SLOT
from compile_passes.recover_pass import RecoverSSMPass


def recoverssm(gm: GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None):
    """Compile with Inductor and :class:`RecoverSSMPass`.

    Args:
        mode: as in ``torch.compile`` for Inductor: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, ...
        options: Inductor options, over those of the mode. A pass in the post-grad slot keeps running, before ours.
    """
    patches = dict(list_mode_options(mode)) if mode else {}
    patches.update(options or {})
    patches[SLOT] = RecoverSSMPass(then=patches.get(SLOT, getattr(config, SLOT)))
    return compile_fx(gm, example_inputs, config_patches=patches)

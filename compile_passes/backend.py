"""``torch.compile(model, backend="recoverssm")``: Inductor with the pass."""

from __future__ import annotations

from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from compile_passes.install import SLOT
from compile_passes.recover_pass import RecoverSSMPass
from compile_passes.reporting.log import warn_if_nothing_was_rewritten
from compile_passes.reporting.report import Report


def recoverssm(gm: GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None):
    """Compile with Inductor and :class:`RecoverSSMPass`.

    Args:
        mode: as in ``torch.compile`` for Inductor: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"``, ...
        options: Inductor options, over those of the mode. A pass in the post-grad slot keeps running, before ours;
            a :class:`RecoverSSMPass` there (with options of its own) is the one that runs.

    A graph of which nothing is rewritten is a warning of the logger ``compile_passes``, once. (Not where a compile cache
    answers: the pass does not run then.)
    """
    patches = dict(list_mode_options(mode)) if mode else {}
    patches.update(options or {})
    installed = patches.get(SLOT, getattr(config, SLOT))
    added = installed if isinstance(installed, RecoverSSMPass) else RecoverSSMPass(then=installed)
    patches[SLOT], before = added, len(added.reports)
    compiled = compile_fx(gm, example_inputs, config_patches=patches)
    if reports := added.reports[before:]:  # several, where the graph has nested regions
        warn_if_nothing_was_rewritten(Report.joined(reports))
    return compiled

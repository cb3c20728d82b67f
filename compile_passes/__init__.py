"""Compiler passes that bring RecoverSSM to models written in ordinary PyTorch.

torch.compile(step, backend="recoverssm")          # Inductor with the pass
with recoverssm_passes(): ...                      # beside the passes of other libraries
print(explain(step, *args))                        # what is rewritten, and why not
verify, commit = split_step(verify, commit)        # where acceptance is decided between two functions
step = slot_step(step)                             # where a slot holds the state after every position
"""

from compile_passes.checking.check import RewriteCheckError
from compile_passes.convolutions.reasons import CONVOLUTION_REASONS
from compile_passes.explain import explain
from compile_passes.exporting.load import load_step
from compile_passes.exporting.step import ExportedStep, export_step
from compile_passes.install import recoverssm_passes
from compile_passes.matching.reasons import REASONS
from compile_passes.recover_pass import RecoverSSMPass
from compile_passes.reporting.report import ConvolutionMatch, LayerMatch, Report
from compile_passes.rewrite import rewrite
from compile_passes.splitting.slot_step import SlotStep, slot_step
from compile_passes.splitting.split import SplitStep, split_step

__all__ = [
    "CONVOLUTION_REASONS",
    "REASONS",
    "ConvolutionMatch",
    "ExportedStep",
    "LayerMatch",
    "RecoverSSMPass",
    "Report",
    "RewriteCheckError",
    "SlotStep",
    "SplitStep",
    "explain",
    "export_step",
    "load_step",
    "recoverssm_passes",
    "rewrite",
    "slot_step",
    "split_step",
]

"""RecoverSSM operators: verify a drafted window from one checkpoint, commit the accepted prefix.

Importing this package registers ``torch.ops.recoverssm``; it imports torch alone (triton on the first CUDA call).
"""

from recoverssm_ops.commit_plan import CommitPlan
from recoverssm_ops.kda import kda_commit, kda_recover, kda_verify
from recoverssm_ops.lifecycle import StepLifecycle
from recoverssm_ops.records import Record
from recoverssm_ops.step_metadata import StepBuffers, StepMetadata
from recoverssm_ops.step_rows import Phase, StepRow

__all__ = [
    "CommitPlan",
    "Phase",
    "Record",
    "StepBuffers",
    "StepLifecycle",
    "StepMetadata",
    "StepRow",
    "kda_commit",
    "kda_recover",
    "kda_verify",
]

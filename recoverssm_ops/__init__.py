"""RecoverSSM operators: verify a drafted window from one checkpoint, commit the accepted prefix.

Importing this package registers ``torch.ops.recoverssm``; it imports torch alone (triton on the first CUDA call).
"""

from recoverssm_ops.commit_plan import CommitPlan
from recoverssm_ops.config import RecoverSSMConfig
from recoverssm_ops.conv import causal_conv1d_commit, causal_conv1d_verify
from recoverssm_ops.kda import kda_commit, kda_recover, kda_verify
from recoverssm_ops.layers import causal_conv1d_commit_layers, kda_commit_layers
from recoverssm_ops.lifecycle import StepLifecycle
from recoverssm_ops.records import Record
from recoverssm_ops.state_spec import LayerShape, StateSpec
from recoverssm_ops.step_metadata import StepBuffers, StepMetadata
from recoverssm_ops.step_rows import Phase, StepRow

__all__ = [
    "CommitPlan",
    "LayerShape",
    "Phase",
    "Record",
    "RecoverSSMConfig",
    "StateSpec",
    "StepBuffers",
    "StepLifecycle",
    "StepMetadata",
    "StepRow",
    "causal_conv1d_commit",
    "causal_conv1d_commit_layers",
    "causal_conv1d_verify",
    "kda_commit",
    "kda_commit_layers",
    "kda_recover",
    "kda_verify",
]

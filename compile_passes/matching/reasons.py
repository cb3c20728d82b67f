"""Why a look-alike is left alone. Every reason has a sentence that says what was found and one that says the cure."""

from __future__ import annotations

from torch.fx import Node

REASONS = {
    "depends_on_output": "a window input depends on an output of the same window; compute q, k, v, g and beta beforehand",
    "gate_mismatch": "the decay is not exp(g) with g per head or per head and key channel; write S * exp(g)",
    "head_too_large": "a head size is above 256",
    "key_mismatch": "the correction and the update use different keys; use the same k for both",
    "missing_output": "a state is read, but not by one query after its token was added; read every updated state once, as S q",
    "no_selection": "the states are not selected by a per-row position inside the graph; select them in the same graph",
    "non_uniform_step": "a step is not S * exp(g) + beta * (v - S k) k^T, nor S * exp(g) + u k^T; write every step alike",
    "rounded_between_steps": "the state is rounded to a lower precision between steps; keep it float32 inside the window",
    "selection_not_per_row": "the selected position varies with more than the row; select one position a row",
    "state_escapes": "a per-position state is used outside the recurrence; drop that use",
    "stored_per_position": "the state after every position is stored for the next step to choose from; wrap the step in "
    "compile_passes.slot_step if nobody else reads those slots, or choose in this graph",
    "unsupported_dtype": "the recurrence is not computed in float32; cast its inputs with .float()",
    "unsupported_layout": "the state is not [batch, heads, V, K] or a permutation of it",
    "window_too_long": "the window has more than 16 tokens",
    "write_before_delta": "the correction reads the state before its decay; decay the state first",
}


class Refused(Exception):
    """The graph is left as it is. ``node`` is where the difference was seen."""

    def __init__(self, reason: str, node: Node):
        super().__init__(f"{reason}: {REASONS[reason]}")
        self.reason, self.node = reason, node

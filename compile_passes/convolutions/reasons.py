"""Why a short convolution is left to the compiler. What each reason says: what was found, and the cure."""

from __future__ import annotations

from torch.fx import Node

CONVOLUTION_REASONS = {
    "history_escapes": "the history, or its sum with the window's inputs, is used elsewhere too; drop that use",
    "history_mismatch": "the pool is not updated by the last W - 1 inputs at one count a row; select columns "
    "n .. n + W - 2 of the history and the window",
    "no_convolution": "the history and the window are joined, but what reads them is no depthwise sum over the last W inputs",
    "no_update": "the pool that the history came from is not updated in this graph; write the new history in the same graph",
    "not_depthwise": "the convolution adds up channels; set groups to the number of channels",
    "on_cpu": "understood, but on the CPU the compiler's own code is faster; RecoverSSMPass(convolutions=True) replaces it",
    "other_slots": "the new history goes to other slots than the old one came from; write to the same slots",
    "rounded_products": "the history, products or sums are rounded to a lower precision on the way; use F.conv1d, or cast its "
    "inputs with .float()",
    "taps_mismatch": "an output is not one weight a channel and tap times its last W inputs (a dilation, a stride, weights "
    "that vary with the token)",
    "unsupported_dtype": "the inputs, the weights or the pool are not float32, bfloat16 or float16",
    "unsupported_layout": "the pool is not [slots, channels, W - 1], oldest input first",
    "window_too_long": "the window has more than 16 tokens",
}


class Left(Exception):
    """The graph is left as it is. ``node`` is where the difference was seen."""

    def __init__(self, reason: str, node: Node):
        super().__init__(f"{reason}: {CONVOLUTION_REASONS[reason]}")
        self.reason, self.node = reason, node

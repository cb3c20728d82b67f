"""Bits per byte of a text: the model's, and the general-purpose compressor's on the very same bytes."""

from __future__ import annotations

import lzma
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.model import KDAForCausalLM


@torch.no_grad()
def bits_per_byte(model: KDAForCausalLM, text: Tensor, *, window: int = 1024, batch: int = 32) -> float:
    """Mean code length of ``text [N]`` (uint8 or int64, on the model's device), every byte counted once.

    Windows overlap by half and all but the first are scored on their second half only, so a byte is predicted from at
    least ``window / 2`` bytes before it. The text's first byte, which nothing predicts, costs 8 bits.
    """
    stride = window // 2
    # Windows of window + 1 bytes: inputs and, one further, targets. Padded targets of -1 are not scored.
    count = max(1, math.ceil((len(text) - 1 - stride) / stride))
    padded = torch.full((stride * (count + 1) + 1,), -1, dtype=torch.int64, device=text.device)
    padded[: len(text)] = text
    windows = padded.unfold(0, window + 1, stride)
    nats = torch.zeros((), dtype=torch.float64, device=text.device)
    for first in range(0, count, batch):
        part = windows[first : first + batch]
        targets = part[:, 1:].clone()
        targets[1 if first == 0 else 0 :, :stride] = -1
        logits = model(part[:, :-1].clamp(min=0))
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum").double()
    return (nats.item() / math.log(2) + 8.0) / len(text)


def xz_bits_per_byte(text: bytes, prefix: bytes = b"") -> float:
    """Bits per byte of ``text`` in ``xz -9``; with a prefix, the bytes it adds to the compressed prefix."""
    size = len(lzma.compress(prefix + text, preset=9))
    if prefix:
        size -= len(lzma.compress(prefix, preset=9))
    return 8 * size / len(text)

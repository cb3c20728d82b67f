"""Which drafts of a window are kept, and which token comes after them."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    num_forced: Tensor,
    temperature: Tensor,
    uniform: Tensor,
    exponential: Tensor,
) -> tuple[Tensor, Tensor]:
    """Verify the drafts of every row and sample one further token.

    ``logits [B, T, vocab]`` float32; ``window [B, T]`` int64, the last committed token followed by ``num_drafts [B]``
    drafts and padding; the first ``num_forced [B]`` drafts are prompt and accepted unseen. ``temperature [B]``: 0 is
    greedy. ``uniform [B, T]`` in [0, 1) and ``exponential [B, vocab]`` (rate 1) are the noise, unused by greedy rows.

    Returns ``tokens [B, T]`` and ``num_accepted [B]`` = 1 + leading accepted drafts. ``tokens[b, :num_accepted[b]]``
    are newly emitted, the last of them newly sampled; entries behind are -1.

    The rule for temperature > 0 is speculative sampling (arXiv:2211.17192) with a draft distribution that is a point
    mass: accept d with probability p(d), else sample from p without d. Emitted tokens are distributed as plain
    sampling's.
    """
    T = window.shape[1]
    index = torch.arange(T, device=window.device)
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None, None]

    # Position t judges the draft at t + 1; the last position has none, and num_drafts < T keeps it from being accepted.
    drafts = window.roll(-1, dims=1)
    draft_probability = scaled.softmax(-1).gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    match = torch.where(greedy.unsqueeze(-1), drafts == logits.argmax(-1), uniform < draft_probability)
    match = match | (index < num_forced.unsqueeze(-1))
    match = match & (index < num_drafts.unsqueeze(-1))
    num_accepted = 1 + match.long().cumprod(-1).sum(-1)

    rows = torch.arange(window.shape[0], device=window.device)
    final = scaled[rows, num_accepted - 1]
    rejected = (num_accepted - 1 < num_drafts) & ~greedy
    rejected_draft = drafts[rows, num_accepted - 1].unsqueeze(-1)
    vocabulary = torch.arange(logits.shape[-1], device=window.device)
    final = final.masked_fill(rejected.unsqueeze(-1) & (vocabulary == rejected_draft), float("-inf"))
    # argmax(logits - log(exponential)) is a sample of softmax(logits).
    gumbel = torch.where(greedy.unsqueeze(-1), 0.0, -exponential.log())
    next_token = (final + gumbel).argmax(-1)

    last = (num_accepted - 1).unsqueeze(-1)
    tokens = torch.where(index < last, drafts, torch.where(index == last, next_token.unsqueeze(-1), -1))
    return tokens, num_accepted

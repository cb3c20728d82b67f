"""One step of speculative decoding as one graph: window forward, acceptance, selection and write-back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.acceptance import accept
from models.model import KDAForCausalLM
from models.pools import Pools
from models.short_conv import history_after


class SpeculativeStep(nn.Module):
    """Advance every request by a window of T tokens.

    T = 1 is plain decoding. A chunk of the prompt is a window whose drafts are known to be right (``num_forced``), so
    prefill is the same graph. All that varies from step to step is a device tensor; nothing waits for the device.
    """

    def __init__(self, model: KDAForCausalLM, pools: Pools) -> None:
        super().__init__()
        self.model = model
        self.pools = pools

    def forward(
        self,
        window: Tensor,
        num_drafts: Tensor,
        num_forced: Tensor,
        positions: Tensor,
        slots: Tensor,
        temperature: Tensor,
        uniform: Tensor,
        exponential: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``window [B, T]``: the last committed token of each request, then drafts, then padding.

        ``positions [B]`` is the count of committed tokens before the window; ``slots [B]`` (distinct) the requests'
        places in the pools. For the rest and the two results see :func:`models.acceptance.accept`. Integers are int64.
        """
        logits, updates = self.model.window(window, positions, slots, self.pools)
        tokens, num_accepted = accept(logits, window, num_drafts, num_forced, temperature, uniform, exponential)
        config = self.model.config
        rows = torch.arange(window.shape[0], device=window.device)
        for i, update in enumerate(updates):
            if config.is_full_attention(i):
                # Written for the whole window: what is rejected lies behind the committed length, and is overwritten.
                columns = positions.unsqueeze(1) + torch.arange(window.shape[1], device=window.device)
                for kind, entries in zip(("key", "value"), update, strict=True):
                    pool = self.pools.of(kind, i)
                    pool[slots.unsqueeze(1), columns] = entries.to(pool.dtype)
            else:
                states, extended = update
                selected = states[rows, num_accepted - 1]
                pool = self.pools.of("recurrent", i)
                pool[slots] = selected.to(pool.dtype)
                history = history_after(extended, num_accepted, config.conv_size)
                pool = self.pools.of("conv", i)
                pool[slots] = history.to(pool.dtype)
        return tokens, num_accepted

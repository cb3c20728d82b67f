"""The language model: pre-norm blocks of KDA and full attention, each followed by a SwiGLU MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import KDAConfig
from models.full_attention import FullAttention
from models.kda import KimiDeltaAttention
from models.layers import RMSNorm, SwiGLU
from models.pools import Pools

# What a layer would write to its pools: (states, extended conv input) of KDA, (keys, values) of full attention.
LayerUpdate = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, config: KDAConfig, layer: int, dropout: float) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = FullAttention(config) if config.is_full_attention(layer) else KimiDeltaAttention(config)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.mixer(self.input_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_norm(x)), self.dropout, self.training)

    def window(self, x: Tensor, *state: Tensor) -> tuple[Tensor, LayerUpdate]:
        y, *update = self.mixer.window(self.input_norm(x), *state)
        x = x + y
        return x + self.mlp(self.post_norm(x)), tuple(update)


class KDAForCausalLM(nn.Module):
    """Kimi-Linear layout: ``full_attn_period - 1`` KDA layers to one full-attention layer."""

    def __init__(self, config: KDAConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i, dropout) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise_linears()

    @torch.no_grad()
    def _initialise_linears(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            # Outputs into the residual stream start small enough that its variance does not grow with depth.
            if name.endswith(("o_proj", "down_proj")):
                module.weight.mul_((2 * self.config.num_layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """A whole sequence in parallel: ``tokens [B, T]`` int64 -> logits ``[B, T, vocab]`` float32."""
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self._logits(x)

    def window(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, pools: Pools
    ) -> tuple[Tensor, list[LayerUpdate]]:
        """A window that continues each request; reads the pools and writes nothing.

        ``tokens [B, T]`` int64, ``positions [B]`` committed tokens before the window, ``slots [B]``. Returns logits
        ``[B, T, vocab]`` float32 and every layer's update, from which the accepted part is selected later.
        """
        x = self.embed_tokens(tokens)
        updates = []
        for i, block in enumerate(self.layers):
            if self.config.is_full_attention(i):
                state = (pools.of("key", i)[slots], pools.of("value", i)[slots], positions)
            else:
                state = (pools.of("recurrent", i)[slots].float(), pools.of("conv", i)[slots])
            x, update = block.window(x, *state)
            updates.append(update)
        return self._logits(x), updates

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weight = self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        # Near-ties decide greedy tokens, so the products are float32 whatever the activations are.
        return F.linear(x.float(), weight.float())

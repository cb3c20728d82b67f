"""Models of transformers in a speculative step: their own code and cache, called once a token.

The pools hold the recurrent states ``[slots, HV, V, K]`` and the convolutions' histories ``[slots, D, W]``. The cache begins
with what the pools hold for the rows, what it holds after every token is kept, and what was accepted goes back into the pools.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from third_party import KIMI_LINEAR, QWEN3_NEXT, SLOTS
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

PAST = 5  # tokens that full attention layers hold already
SIZES = dict(
    vocab_size=32, hidden_size=24, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MODULES = {"Qwen3Next": QWEN3_NEXT, "KimiLinear": KIMI_LINEAR}
CONFIGS = {
    "Qwen3Next": dict(
        head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    ),
    "KimiLinear": dict(
        linear_num_heads=2, linear_head_dim=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6,
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    ),
}  # fmt: skip
# What full attention holds of a token: keys and values a head, or (latent attention) what both are made of.
HELD = {"Qwen3Next": ((2, 8), (2, 8)), "KimiLinear": ((1, 6), (1, 4))}


@contextlib.contextmanager
def pytorch_functions(name: str) -> Iterator[None]:
    """As if no other library were installed: otherwise its kernels take the place of the model's own functions."""
    module = importlib.import_module(MODULES[name])
    wrapped = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    with mock.patch.multiple(module, **{n: inspect.unwrap(f) for n, f in wrapped.items()}):
        yield


class ModelStep(nn.Module):
    """``step(tokens [B, T], slots, num_accepted, held) -> hidden states [B, T, D]``; ``held`` as ``past`` makes it."""

    def __init__(self, name: str, layer_types: list[str]) -> None:
        super().__init__()
        module = importlib.import_module(MODULES[name])
        sizes = SIZES | CONFIGS[name] | {"num_hidden_layers": len(layer_types), "layer_types": layer_types}
        torch.manual_seed(0)
        self.model = getattr(module, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
        self.eval().requires_grad_(False)
        self.name, self.layer_types = name, layer_types
        for i in self.linear_layers:
            layer = next(m for m in self.model.layers[i].modules() if hasattr(m, "conv1d"))
            heads, V, K = (4, 6, 8) if name == "Qwen3Next" else (2, 8, 8)
            self.register_buffer(f"states{i}", torch.randn(SLOTS, heads, V, K))
            self.register_buffer(f"histories{i}", torch.randn(SLOTS, layer.conv_dim, layer.conv_kernel_size))

    @property
    def linear_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]

    def pools(self) -> list[tuple[Tensor, Tensor]]:
        return [(getattr(self, f"states{i}"), getattr(self, f"histories{i}")) for i in self.linear_layers]

    def past(self, batch: int) -> list[Tensor]:
        sizes = HELD[self.name] * self.layer_types.count("full_attention")
        return [torch.randn(batch, heads, PAST, width) for heads, width in sizes]

    def forward(self, tokens: Tensor, slots: Tensor, num_accepted: Tensor, held: list[Tensor]) -> Tensor:
        cache = self._cache(slots, held)
        linear = [cache.layers[i] for i in self.linear_layers]
        outputs, states, histories = [], [[] for _ in linear], [[] for _ in linear]
        for t in range(tokens.shape[1]):
            position = torch.full((1, 1), PAST + t)
            outputs.append(self.model(tokens[:, t : t + 1], position_ids=position, cache=cache).last_hidden_state)
            for layer, *kept in zip(linear, states, histories, strict=True):
                kept[0].append(layer.recurrent_states[0].clone())
                kept[1].append(layer.conv_states[0].clone())
        rows = torch.arange(len(slots))
        for (pool, history), *kept in zip(self.pools(), states, histories, strict=True):
            pool[slots] = torch.stack(kept[0], 1)[rows, num_accepted - 1].mT
            history[slots] = torch.stack(kept[1], 1)[rows, num_accepted - 1]
        return torch.cat(outputs, 1)

    def _cache(self, slots: Tensor, held: list[Tensor]):
        pools, held, layers = iter(self.pools()), iter(held), []
        for kind in self.layer_types:
            if kind == "full_attention":
                layer = cache_utils.DynamicLayer()
                layer.keys, layer.values, layer.is_initialized = next(held), next(held), True
            else:
                layer = cache_utils.LinearAttentionLayer()
                pool, history = next(pools)
                layer.recurrent_states[0], layer.conv_states[0] = pool[slots].mT, history[slots]
                layer.conv_kernel_size[0] = history.shape[-1]
                for flags in (layer.is_recurrent_states_initialized, layer.is_conv_states_initialized):
                    flags[0] = True
                layer.has_previous_state[0] = True
            layers.append(layer)
        return cache_utils.Cache(layers=layers)

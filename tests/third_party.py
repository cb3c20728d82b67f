"""Linear attention as other libraries publish it, and a harness that drives it through a speculative window.

The functions return the state after their last token only. Called once a token, each call beginning with the state of the call
before, they give the state after every position; their source stays as it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from recoverssm_ops import reference

SLOTS, BATCH, HEADS, KEY_DIM, VALUE_DIM = 5, 3, 2, 8, 6
LAYOUTS = ("key_first", "value_first")
FLA, TRANSFORMERS = ("q", "k", "v", "g", "beta"), ("query", "key", "value", "g", "beta")


@dataclass(frozen=True)
class Published:
    """A function of a window ``[B, T, H, ..]`` and a state ``[B, HV, K, V]``."""

    module: str
    name: str
    arguments: tuple[str, ...]
    decay_per_channel: bool
    value_heads: int = HEADS
    options: dict[str, object] = field(default_factory=dict)

    def load(self) -> Callable:
        """The PyTorch function itself: transformers wraps its own so that a kernel of another library may take its place."""
        package = self.module.split(".")[0]
        pytest.importorskip(package)
        return inspect.unwrap(getattr(importlib.import_module(self.module), self.name))

    def window(self, T: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """q, k, v, the log decay and the step size."""
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q, k = rand(BATCH, T, HEADS, KEY_DIM), 0.4 * rand(BATCH, T, HEADS, KEY_DIM)
        v, beta = rand(BATCH, T, self.value_heads, VALUE_DIM), rand(BATCH, T, self.value_heads).sigmoid()
        g = -rand(*beta.shape, *([KEY_DIM] if self.decay_per_channel else [])).abs()
        return [x.to(dtype) for x in (q, k, v, g, beta)]


QWEN3_NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
KIMI_LINEAR = "transformers.models.kimi_linear.modeling_kimi_linear"
NORMALISED = {"use_qk_l2norm_in_kernel": True}
RECURRENT = {
    p.name: p
    for p in (
        Published("fla.ops.kda.naive", "naive_recurrent_kda", FLA, True, value_heads=2 * HEADS),
        Published("fla.ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", FLA, False),
        Published(QWEN3_NEXT, "torch_recurrent_gated_delta_rule", TRANSFORMERS, False, 2 * HEADS, NORMALISED),
        Published(KIMI_LINEAR, "recurrent_kimi_delta_attention", TRANSFORMERS, True, options=NORMALISED),
    )
}
CHUNKED = Published(QWEN3_NEXT, "torch_chunk_gated_delta_rule", TRANSFORMERS, False, options=NORMALISED)


def pool_of(value_heads: int, layout: str, seed: int = 1) -> Tensor:
    sizes = (KEY_DIM, VALUE_DIM) if layout == "key_first" else (VALUE_DIM, KEY_DIM)
    return torch.randn(SLOTS, value_heads, *sizes, generator=torch.Generator().manual_seed(seed))


def step_of(published: Published, layout: str) -> Callable:
    """``step(pool, slots, num_accepted, q, k, v, g, beta) -> o``: a window, selection of the accepted states, write-back."""
    function = published.load()

    def as_published(S: Tensor) -> Tensor:
        return S if layout == "key_first" else S.transpose(-1, -2)

    def step(pool: Tensor, slots: Tensor, num_accepted: Tensor, *window: Tensor) -> Tensor:
        S, outputs, states = as_published(pool[slots]), [], []
        for t in range(window[0].shape[1]):
            token = {name: x[:, t : t + 1] for name, x in zip(published.arguments, window, strict=True)}
            o, S = function(**token, initial_state=S, output_final_state=True, **published.options)
            outputs.append(o)
            states.append(S)
        selected = torch.stack(states, 1)[torch.arange(len(slots)), num_accepted - 1]
        pool[slots] = as_published(selected)
        return torch.cat(outputs, 1)

    return step


def exact_step(published: Published, layout: str, pool: Tensor, slots: Tensor, num_accepted: Tensor, *window: Tensor):
    """Outputs and pool of the same step by the library's formula in float64."""
    q, k, v, g, beta = window
    pool, outputs = pool.double(), []
    for row, (slot, accepted) in enumerate(zip(slots.tolist(), num_accepted.tolist(), strict=True)):
        S0 = pool[slot].mT if layout == "key_first" else pool[slot]
        tensors = [x[row] for x in (q, k, v, g, beta)]
        o, _, states = reference.recurrence(*tensors, S0, scale=KEY_DIM**-0.5, **published.options)
        pool[slot] = states[accepted].mT if layout == "key_first" else states[accepted]
        outputs.append(o)
    return torch.stack(outputs), pool

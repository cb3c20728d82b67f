"""The sizes an engine is built from: they decide what it allocates, so its memory is known before it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from models.config import KDAConfig
from models.decode import Drafter
from models.drafting import prompt_lookup
from models.engine import Engine, batch_buckets
from models.memory_plan import MemoryPlan
from models.model import KDAForCausalLM
from models.pools import Pools
from models.prefix_cache import PrefixCache
from models.speculation import SpeculativeStep


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """``max_length`` is of a prompt, its continuation and one window; ``block_size`` None means no prefix cache.

    ``cache_budget`` is in bytes. ``dtype`` is that of the model, its convolution state, keys and values. ``most_buckets``
    bounds the batch sizes that steps are padded to: each of them is compiled and captured.
    """

    max_running: int
    num_drafts: int
    max_length: int
    block_size: int | None = None
    cache_budget: int = 0
    dtype: torch.dtype = torch.float32
    recurrent_dtype: torch.dtype = torch.float32
    most_buckets: int = 8

    @property
    def buckets(self) -> list[int]:
        return batch_buckets(self.max_running, self.most_buckets)

    def planned_bytes(self, config: KDAConfig) -> dict[str, int]:
        """What :attr:`models.engine.Engine.allocated_bytes` will be."""
        plan = MemoryPlan(config, self.dtype, self.recurrent_dtype)
        return {
            "pools": plan.pools_bytes(1 + self.max_running, self.max_length),
            "prefix cache": plan.cache_bytes(self.block_size, self.cache_budget) if self.block_size else 0,
            "step inputs": plan.inputs_bytes(1 + self.num_drafts, self.buckets),
        }

    def build(
        self,
        model: KDAForCausalLM,
        *,
        drafter: Drafter = prompt_lookup,
        compile_step: Callable[[SpeculativeStep], Callable] | None = None,
    ) -> Engine:
        """An engine on the model's device; ``compile_step`` makes what runs a step (None: the step runs eagerly)."""
        weight = model.embed_tokens.weight
        if weight.dtype != self.dtype:
            raise ValueError(f"the model is in {weight.dtype}, the engine is planned for {self.dtype}")
        pools = Pools(
            model.config,
            1 + self.max_running,
            self.max_length,
            device=weight.device,
            dtype=self.dtype,
            recurrent_dtype=self.recurrent_dtype,
        )
        step = SpeculativeStep(model, pools)
        return Engine(
            step,
            num_drafts=self.num_drafts,
            step_fn=compile_step(step) if compile_step else None,
            drafter=drafter,
            prefix_cache=PrefixCache(pools, self.block_size, self.cache_budget) if self.block_size else None,
            buckets=self.buckets,
        )

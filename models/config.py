"""Sizes of the model, and the two presets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Configuration of :class:`models.model.KDAForCausalLM` (Kimi-Linear layout).

    ``full_attn_period`` = n makes every n-th layer full attention (4: three KDA layers, then one full); 0 means none.
    ``num_kv_heads`` is of the full-attention layers alone: their cache is kept small by sharing keys and values, as
    Kimi Linear keeps its own small with a latent. ``lower_bound`` is the bounded decay gate's floor in nats per token;
    None selects the unbounded softplus gate. ``max_length`` is the longest sequence (prompt and generated tokens
    together) the model was trained for.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_layers: int = 4
    full_attn_period: int = 4
    num_heads: int = 4
    num_kv_heads: int = 1
    head_k_dim: int = 64
    head_v_dim: int = 64
    conv_size: int = 4
    gate_rank: int = 64
    intermediate_size: int = 768
    lower_bound: float | None = -5.0
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    max_length: int = 1024

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_k_dim", "head_v_dim")
        for name in (*sizes, "gate_rank", "intermediate_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) should be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.conv_size < 2:
            raise ValueError(f"conv_size should be at least 2, got {self.conv_size}")
        if self.full_attn_period < 0:
            raise ValueError(f"full_attn_period should be 0 (none) or positive, got {self.full_attn_period}")
        if self.lower_bound is not None and self.lower_bound >= 0:
            raise ValueError(f"lower_bound should be negative or None, got {self.lower_bound}")

    def is_full_attention(self, layer: int) -> bool:
        return self.full_attn_period > 0 and (layer + 1) % self.full_attn_period == 0

    @property
    def key_dim(self) -> int:
        return self.num_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of one KDA layer's short convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: str | Path) -> KDAConfig:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"{path}: unknown configuration fields {sorted(unknown)}")
        return cls(**fields)


PRESETS = {
    # The shipped byte-level model: 3 KDA layers and 1 full-attention layer.
    "bytes": KDAConfig(),
    # One KDA layer has the published Kimi Linear 48B-A3B shape (32 heads of 128); a modest dense MLP replaces the
    # experts.
    "kimi_linear": KDAConfig(
        vocab_size=4096,
        hidden_size=2304,
        num_layers=8,
        full_attn_period=0,
        num_heads=32,
        head_k_dim=128,
        head_v_dim=128,
        gate_rank=128,
        intermediate_size=4608,
        max_length=4096,
    ),
}

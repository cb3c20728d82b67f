"""Sizes of a Kimi-Linear style model from its Hugging Face ``config.json``."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KimiShape:
    """What the planner needs of a config.

    Attributes:
        num_layers, num_heads, head_dim, conv_width: of the linear attention layers (K = V = ``head_dim``, HV = H).
        activation_dtype: the model's dtype.
        full_attention_layers: layers with a KV cache.
        latent_elements: values cached per token and full attention layer by multi-head latent attention (the latent and the
            shared key part), the same on every tensor parallel rank; None for grouped-query attention.
        kv_heads, kv_head_dim: of grouped-query attention, each with a key and a value.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    conv_width: int
    activation_dtype: torch.dtype
    full_attention_layers: int
    latent_elements: int | None
    kv_heads: int
    kv_head_dim: int

    def kv_elements(self, tensor_parallel: int) -> int:
        """Values cached per token and full attention layer on one rank."""
        if self.latent_elements is not None:
            return self.latent_elements
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise ValueError(
                f"tensor_parallel should divide num_key_value_heads {self.kv_heads} or be a multiple of it, but was "
                f"{tensor_parallel}"
            )
        return 2 * max(self.kv_heads // tensor_parallel, 1) * self.kv_head_dim


class _Fields:
    """A JSON object whose fields are read with their names in every complaint."""

    def __init__(self, path: Path, fields: dict, prefix: str = "") -> None:
        self.path, self.fields, self.prefix = path, fields, prefix

    def wrong(self, name: str, wanted: str) -> ValueError:
        found = f"was {json.dumps(self.fields[name])}" if name in self.fields else "is missing"
        return ValueError(f"{self.path}: {self.prefix}{name} should be {wanted}, but {found}")

    def section(self, name: str, wanted: str) -> "_Fields":
        if not isinstance(self.fields.get(name), dict):
            raise self.wrong(name, wanted)
        return _Fields(self.path, self.fields[name], f"{self.prefix}{name}.")

    def size(self, name: str, least: int = 1) -> int:
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def optional_size(self, name: str, default: int, least: int = 1) -> int:
        return default if self.fields.get(name) is None else self.size(name, least)

    def layers(self, name: str) -> set[int]:
        value = self.fields.get(name)
        if not isinstance(value, list) or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in value):
            raise self.wrong(name, "a list of layer numbers")
        if len(set(value)) != len(value):
            raise self.wrong(name, "a list of distinct layer numbers")
        return set(value)


def read_kimi_config(path: str | Path) -> KimiShape:
    """Read the ``config.json`` of Kimi-Linear, of a model built like it, or of a multimodal model around one.

    Args:
        path: the file, or the model's directory. Sizes are in ``linear_attn_config`` (``kda_layers``, ``full_attn_layers``,
            ``num_heads``, ``head_dim``, ``short_conv_kernel_size``), at the top or in ``text_config``.

    Raises:
        ValueError: the file is missing or is not such a config; the message names the file and the field.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a Hugging Face config.json or its directory") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or numbers and nesting beyond Python's limits
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: should hold a JSON object, but held {type(fields).__name__}")

    top = _Fields(path, fields)
    if "linear_attn_config" not in fields and isinstance(fields.get("text_config"), dict):
        top = top.section("text_config", "an object")
    model_type = top.fields.get("model_type", "unknown")
    linear = top.section("linear_attn_config", f"an object, as in a Kimi-Linear config (model_type here: {model_type})")
    kda = linear.layers("kda_layers")
    if not kda:
        raise linear.wrong("kda_layers", "a list of at least one layer number")
    all_layers = top.size("num_hidden_layers", len(kda))
    if "full_attn_layers" in linear.fields:
        full = linear.layers("full_attn_layers")
        if full & kda or len(full) + len(kda) != all_layers:
            raise linear.wrong(
                "full_attn_layers",
                f"the other {all_layers - len(kda)} of num_hidden_layers {all_layers} beside kda_layers",
            )
    attention_heads = top.optional_size("num_attention_heads", linear.size("num_heads"))
    kv_heads, latent = top.optional_size("num_key_value_heads", attention_heads), None
    if top.fields.get("kv_lora_rank") is not None:
        latent = top.size("kv_lora_rank") + top.optional_size("qk_rope_head_dim", 0, least=0)
    return KimiShape(
        num_layers=len(kda),
        num_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_width=linear.size("short_conv_kernel_size"),
        activation_dtype=_dtype(top),
        full_attention_layers=all_layers - len(kda),
        latent_elements=latent,
        kv_heads=kv_heads,
        kv_head_dim=top.optional_size("head_dim", linear.size("head_dim")),
    )


def _dtype(top: _Fields) -> torch.dtype:
    """Newer configs call it ``dtype``, older ones ``torch_dtype``."""
    for name in ("dtype", "torch_dtype"):
        value = top.fields.get(name)
        if value is not None:
            if not isinstance(value, str) or value not in DTYPES:
                raise top.wrong(name, f"one of {', '.join(DTYPES)}")
            return DTYPES[value]
    return torch.bfloat16

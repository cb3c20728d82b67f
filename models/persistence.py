"""Weights and configuration on disk: ``model.safetensors`` beside ``config.json``."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.config import KDAConfig
from models.model import KDAForCausalLM

WEIGHTS = Path(__file__).parent / "weights"


def save_model(model: KDAForCausalLM, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with its parameters rounded to ``dtype``; returns the weights' path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    (directory / "config.json").write_text(model.config.to_json(), encoding="utf-8")
    return path


def load_model(
    directory: Path = WEIGHTS, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> KDAForCausalLM:
    """Read a saved model for inference. Raises FileNotFoundError naming what is missing."""
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"no {name} in {directory}: train a model with `python -m models.train --out {directory}`"
            )
    model = KDAForCausalLM(KDAConfig.from_json(directory / "config.json"))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return model

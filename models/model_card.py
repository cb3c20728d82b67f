"""The model card beside the weights, filled from the figures the training run measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from models.corpus import HELD_OUT, VALIDATION


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one training run measured. ``*_bpb`` are bits per byte."""

    python: str
    torch: str
    device: str
    parameters: int
    steps: int
    kept_step: int
    tokens_seen: int
    train_bytes: int
    held_out_bytes: int
    seconds: float
    compile_seconds: float
    validation_bpb: float
    history: list[dict[str, float]]
    held_out_bpb: float = float("nan")
    xz_bpb: float = float("nan")
    xz_primed_bpb: float = float("nan")
    file_bytes: int = 0


CARD = """# Byte-level KDA language model

A small causal language model in the Kimi-Linear layout (three Kimi Delta Attention layers, one full-attention layer),
trained to demonstrate speculative decoding on real text. It completes Python source and knows nothing else.

| | |
|---|---|
| parameters | {parameters:,} (bf16, {file_megabytes:.2f} MB) |
| vocabulary | 256 bytes |
| training text | source of the standard library of Python {python}, {train_bytes:,} bytes |
| licence of the text | Python Software Foundation License Version 2 |
| bytes seen | {tokens_seen:,} ({epochs:.1f} times the text) in {kept_step:,} steps, after which the weights were kept |
| training time | {seconds:.0f} s for {steps:,} steps on {device}, PyTorch {torch} |
| of which compilation and first step | {compile_seconds:.0f} s |

Loss on held-out modules ({held_out_bytes:,} bytes that training never saw), measured with the rounded weights in this
directory, against a general-purpose compressor on the very same bytes:

| | bits per byte |
|---|---|
| this model | **{held_out_bpb:.3f}** |
| `xz -9` | {xz_bpb:.3f} |
| `xz -9`, after the training text | {xz_primed_bpb:.3f} |

The second xz row is the size that the held-out text adds to the compressed training text, so both sides have seen the
same.

Held out: {held_out}.

Used to choose which weights to keep (validation, {validation_bpb:.3f} bits per byte): {validation}.

Excluded: site packages, tests, lib2to3, files generated per machine. Every window is {seq_len} bytes; longer contexts
are untrained.

To reproduce (another Python version has another standard library; kernels of another GPU round differently):

    {command}

`training.json` holds the run's validation curve and every figure above.
"""


def write_model_card(directory: Path, figures: Figures, arguments: argparse.Namespace) -> None:
    """Write ``README.md`` and ``training.json`` into the weights' directory."""
    values = dataclasses.asdict(figures)
    card = CARD.format(
        **values,
        file_megabytes=figures.file_bytes / 1e6,
        epochs=figures.tokens_seen / figures.train_bytes,
        held_out=", ".join(f"`{name}`" for name in sorted(HELD_OUT)),
        validation=", ".join(f"`{name}`" for name in sorted(VALIDATION)),
        seq_len=arguments.seq_len,
        command=reproduce_command(arguments),
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
    (directory / "training.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def reproduce_command(arguments: argparse.Namespace) -> str:
    schedule = "minutes" if arguments.minutes else "steps"
    options = [schedule, "batch", "seq_len", "lr", "weight_decay", "dropout", "warmup", "eval_every", "seed"]
    return "python -m models.train " + " ".join(f"--{o.replace('_', '-')} {getattr(arguments, o)}" for o in options)

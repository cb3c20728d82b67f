"""What ``python -m models.serve`` can be asked to do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from models.generate import DTYPES, MAX_DRAFTS, UsageError
from models.persistence import WEIGHTS

BACKENDS = ("eager", "inductor", "recoverssm")
GRAPHS = ("none", "inductor", "manual")
# What an option is where it is not given, in the demo and in a soak.
DEFAULTS = {
    "slots": (8, 32),
    "drafts": (7, 5),
    "batch_sizes": (8, 3),
    "tokens": (64, 24),
    "prompt_length": (256, 56),
    "block_size": (32, 8),
    "cache_mib": (16.0, 0.25),
    "arrival_rate": (0.5, 2.0),
    "preemption_rate": (0.02, 0.2),
}


def argument_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.serve", description=description)

    def option(name: str, kind: Callable, text: str) -> None:
        demo, soak = DEFAULTS[name]
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, help=f"{text} (default: {demo}, in a soak {soak})")

    parser.add_argument("--requests", type=int, default=32, help="requests of the demo")
    parser.add_argument("--soak", type=int, metavar="N", help="instead: N random requests, small random model")
    option("slots", int, "requests that run at once")
    option("drafts", int, f"drafts a step, 0..{MAX_DRAFTS}")
    option("batch_sizes", int, "most batch sizes to compile and capture: the slots, their half, and so on")
    option("tokens", int, "new tokens a request, in a soak at most")
    option("prompt_length", int, "tokens of the longest prompt")
    option("block_size", int, "tokens between two states in the prefix cache")
    option("cache_mib", float, "MiB of prefix cache; 0 is none")
    option("arrival_rate", float, "requests that arrive per step on average")
    option("preemption_rate", float, "probability that a step begins with a preemption")
    parser.add_argument("--check", type=int, default=8, help="requests of the demo to compare with solo decoding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    # In low precision the size of a batch rounds its products differently, and a near-tie may then be decided otherwise.
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the demo's weights and activations; texts of a batch and of solo decoding may differ in low precision",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="eager", help="what runs a step")
    parser.add_argument(
        "--graphs",
        choices=GRAPHS,
        help="a step of each batch size as one CUDA graph: recorded by the engine (manual) or by Inductor, which may skip "
        "none (default: manual on a GPU, none elsewhere)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="of the demo: model.safetensors and config.json")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Fill in the defaults; raise UsageError for options that cannot be honoured."""
    for name, (demo, soak) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, demo if options.soak is None else soak)
    names = ("requests", "slots", "batch_sizes", "tokens", "prompt_length", "block_size", "threads")
    least = {name: 1 for name in names} | {"check": 0} | ({} if options.soak is None else {"soak": 1})
    for name, bound in least.items():
        if getattr(options, name) < bound:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} should be at least {bound}, got {getattr(options, name)}")
    if not 0 <= options.drafts <= MAX_DRAFTS:
        raise UsageError(f"--drafts should be in 0..{MAX_DRAFTS}, got {options.drafts}")
    # Comparisons are written so that NaN is refused too.
    if not 0 <= options.cache_mib < float("inf"):
        raise UsageError(f"--cache-mib should be finite and not negative, got {options.cache_mib}")
    if not 0 < options.arrival_rate < float("inf"):
        raise UsageError(f"--arrival-rate should be positive and finite, got {options.arrival_rate}")
    # At 1 the requests of a busy engine could take each other's slots for ever.
    if not 0 <= options.preemption_rate < 1:
        raise UsageError(f"--preemption-rate should be in 0..1, less than 1, got {options.preemption_rate}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")
    if options.graphs is None:
        options.graphs = "manual" if options.device == "cuda" else "none"
    if options.graphs != "none" and options.device != "cuda":
        raise UsageError(f"--graphs {options.graphs} needs --device cuda: what is recorded are launches on a CUDA GPU")
    if options.graphs == "inductor" and options.backend == "eager":
        raise UsageError(
            "--graphs inductor needs --backend inductor or recoverssm: Inductor records what it has compiled"
        )

"""Compile the model's speculative step for the C++ runner: ``python -m models.runner.export DIRECTORY``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from compile_passes import export_step
from models.decode import example_inputs
from models.model import KDAForCausalLM
from models.persistence import WEIGHTS, load_model
from models.pools import Pools
from models.speculation import SpeculativeStep


def export_for_runner(
    model: KDAForCausalLM, directory: Path, *, num_drafts: int, max_length: int, halves: bool = False
) -> list[Path]:
    """Write ``step.aoti.pt2``, or the halves ``verify.aoti.pt2`` and ``commit.aoti.pt2``, for one request of at most
    ``max_length`` positions, on the model's device; returns the paths in the order in which the runner takes them.

    On CUDA the packages hold the Triton kernels, on the CPU the operators' portable form. The pools of the whole step are
    inside its package, those of the halves are the runner's.
    """
    device = next(model.parameters()).device
    step = SpeculativeStep(model, Pools(model.config, 1, max_length, device=device)).requires_grad_(False)
    inputs = example_inputs(1, num_drafts, model.config.vocab_size, device)
    on_gpu = device.type == "cuda"
    exported = export_step(step, inputs, portable=not on_gpu, triton=on_gpu)
    print(exported.report)
    programs = ("verify", "commit") if halves else ("step",)
    exported.save(directory, aot_inductor=programs)
    return [directory / f"{name}.aoti.pt2" for name in programs]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.runner.export", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--drafts", type=int, default=7, help="drafts a step, 1..15")
    parser.add_argument("--halves", action="store_true", help="verify and commit as packages of their own")
    parser.add_argument("--max-length", type=int, help="positions of the pools (default: the model's longest sequence)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the package will run")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    options = parser.parse_args(argv)
    if not 1 <= options.drafts <= 15:
        parser.error(f"--drafts should be in 1..15, got {options.drafts}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA GPU, on which the package's kernels are compiled")
    model = load_model(options.weights, device=options.device)
    longest = options.max_length or model.config.max_length
    sizes = {"num_drafts": options.drafts, "max_length": longest}
    print(*export_for_runner(model, options.directory, halves=options.halves, **sizes))


if __name__ == "__main__":
    main()

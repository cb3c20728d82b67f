"""Exported steps as AOTInductor packages, which run without Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compile_passes.exporting.forms import OPERATORS
from compile_passes.exporting.graph import ExportError

if TYPE_CHECKING:
    from compile_passes.exporting.step import ExportedStep


def compile_package(exported: ExportedStep, name: str, path: Path, inductor_configs: dict | None = None) -> None:
    """Compile one program of ``exported`` into the package ``path``.

    The package's metadata hold what a runner without a JSON parser has to check: ``recoverssm.window``, ``.pools``,
    ``.torch``, ``.device``, ``.program``, and its ``.inputs``, ``.outputs`` and ``.buffers`` as ``name:dtype:2x8`` with
    spaces between.
    """
    emitted, manifest = exported.emitted[name], exported.manifest
    if any(node.target in OPERATORS for node in emitted.program.graph.nodes):
        raise ExportError(
            f"{name} calls operators that are registered from Python, which a package cannot; export with portable=True, or "
            "on CUDA with triton=True"
        )
    if manifest.operators == "triton" and manifest.device != "cuda":
        raise ExportError(f"the Triton kernels run on CUDA, but {name} was exported on {manifest.device}")
    described = manifest.programs[name]
    metadata = {
        "recoverssm.program": name,
        "recoverssm.window": str(manifest.window),
        "recoverssm.pools": manifest.pools if name == "step" else "inputs",
        "recoverssm.torch": torch.__version__,
        "recoverssm.device": manifest.device,
        **{f"recoverssm.{kind}": " ".join(map(_port, described[kind])) for kind in ("inputs", "outputs", "buffers")},
    }
    # A functional graph would update its pools by copies: the program's own mutations are in place.
    configs = {"aot_inductor.metadata": metadata, **(inductor_configs or {})}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(emitted.program, package_path=str(path), inductor_configs=configs)


def _port(port: dict) -> str:
    return f"{port['name']}:{port['dtype']}:{'x'.join(map(str, port['shape']))}"

"""What a runtime must know to bind an exported step: the manifest beside the programs, in JSON."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

import recoverssm_ops.ops as ops
from compile_passes.exporting.emit import Emitted, Port
from compile_passes.exporting.graph import StepGraph
from compile_passes.reading.index_notation import size_hint

FORMAT = 1
FILE = "manifest.json"
_GATE = (
    "lower_bound",
    "scale",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)


class ManifestError(ValueError):
    """An exported step is not what its user expects; the message names the difference."""


@dataclass
class Manifest:
    """Attributes as in the file; ``docs/export.md`` describes it. Shapes hold numbers, or names of ``dims``.

    Attributes:
        window: tokens of a window, drafts and the last committed one.
        pools: ``buffers`` (of the program), ``inputs`` (updated in place) or ``functional`` (inputs and outputs).
        operators: ``recoverssm`` (importing recoverssm_ops is needed), ``portable`` (plain ATen) or ``triton`` (kernels).
        layers: one dictionary for each layer's verify: sizes, dtypes of state and activations, gate.
        dims: name of a dynamic size: least and greatest value (None: no limit).
        programs: name: files, inputs and outputs.
        uncut: why there are no halves, or None.
    """

    window: int | None
    pools: str
    operators: str
    device: str
    layers: list[dict]
    dims: dict[str, list]
    programs: dict[str, dict] = field(default_factory=dict)
    uncut: str | None = None
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__, "recoverssm": version()})
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps(vars(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Raises FileNotFoundError, or :class:`ManifestError` for a file that this version cannot read."""
        path = Path(directory) / FILE
        if not path.is_file():
            raise FileNotFoundError(f"no {FILE} in {directory}: it is not a saved step")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values.get("format")
        except (ValueError, AttributeError) as error:
            raise ManifestError(f"{path} is not a manifest: {error}") from error
        if found != FORMAT:
            raise ManifestError(f"{path} has format {found}; this version reads format {FORMAT}")
        return cls(**values)


def version() -> str:
    try:
        return importlib.metadata.version("recoverssm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_layers(step: StepGraph) -> list[dict]:
    """Of every kda_verify in the graph, in order."""
    names = [a.name for a in ops.kda_verify._schema.arguments]
    layers = []
    for node in step.graph.find_nodes(op="call_function", target=ops.kda_verify):
        arguments = dict(zip(names, node.args, strict=True))
        q, v, state, g = (arguments[name].meta["val"] for name in ("q", "v", "state", "g"))
        layers.append(
            {
                "window": arguments["max_seqlen"],
                "heads": size_hint(q.shape[2]),
                "value_heads": size_hint(v.shape[2]),
                "key_dim": size_hint(q.shape[3]),
                "value_dim": size_hint(v.shape[3]),
                "scalar_gate": g.ndim == 3,
                "state_dtype": dtype_name(state.dtype),
                "dtype": dtype_name(v.dtype),
                **{name: arguments[name] for name in _GATE},
            }
        )
    return layers


def describe_program(name: str, emitted: Emitted) -> dict:
    ports = {"inputs": emitted.inputs, "outputs": emitted.outputs, "buffers": emitted.buffers}
    return {
        "file": f"{name}.pt2",
        "package": None,
        **{kind: [_port(p) for p in found] for kind, found in ports.items()},
    }


def _port(port: Port) -> dict:
    return {"name": port.name, "role": port.role, "shape": list(port.shape), "dtype": dtype_name(port.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

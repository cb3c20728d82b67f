"""``export_step``: a rewritten step as exported programs, whole or cut at acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from compile_passes.exporting.cut import Cut, cut
from compile_passes.exporting.emit import Emitted, Emitter
from compile_passes.exporting.forms import OPERATORS, operator_table
from compile_passes.exporting.graph import ExportError, StepGraph, as_module, trace_step
from compile_passes.exporting.manifest import Manifest, describe_layers, describe_program
from compile_passes.exporting.writes import find_writes
from compile_passes.reporting.report import Report

PROGRAMS = ("step", "verify", "commit")


class NotRewrittenError(ExportError):
    """The pass found nothing that it could rewrite. ``report`` says why; the message holds it as a table."""

    def __init__(self, report: Report):
        super().__init__(
            f"the pass rewrote no layer of this step; with allow_unrewritten=True it is exported as it is.\n{report}"
        )
        self.report = report


@dataclass
class ExportedStep:
    """What :func:`export_step` returns.

    Every program takes and returns flat tuples of tensors: a runtime outside Python knows no nested arguments. Their names,
    roles and order are in ``manifest.programs``; ``.save`` writes both.

    Attributes:
        report: the pass' report.
        manifest: the :class:`~compile_passes.exporting.manifest.Manifest`.
    """

    report: Report
    manifest: Manifest
    emitted: dict[str, Emitted]

    @property
    def step(self) -> ExportedProgram:
        """The whole step: inputs (then pools that are not buffers) to results (then pools, where functional)."""
        return self._program("step")

    @property
    def verify(self) -> ExportedProgram:
        """The half before the commit: inputs and pools to results and record. Writes no pool."""
        return self._program("verify")

    @property
    def commit(self) -> ExportedProgram:
        """The half that updates the pools: ``num_accepted``, inputs and record, and the pools.

        ``num_accepted`` counts 1..T as the step itself does. Pools are inputs, updated in place, since two programs cannot
        own one buffer.
        """
        return self._program("commit")

    def _program(self, name: str) -> ExportedProgram:
        if name not in self.emitted:
            raise ExportError(f"no {name}: {self.manifest.uncut}")
        return self.emitted[name].program

    def save(
        self, directory: str | Path, *, aot_inductor: Sequence[str] = (), inductor_configs: dict | None = None
    ) -> Path:
        """Write the programs and ``manifest.json``; returns the directory.

        Example inputs, and with them pools that are inputs, are not saved; buffers are.

        Args:
            aot_inductor: programs (of ``step``, ``verify``, ``commit``) to compile, too, as ``<name>.aoti.pt2``.
            inductor_configs: for AOTInductor, over what it needs.
        """
        from compile_passes.exporting.aoti import compile_package

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        unknown = set(aot_inductor) - set(self.emitted)
        if unknown:
            message = f"aot_inductor should name programs of {sorted(self.emitted)}, but had {sorted(unknown)}"
            raise ExportError(f"{message}: {self.manifest.uncut}" if self.manifest.uncut else message)
        for name, emitted in self.emitted.items():
            described = self.manifest.programs[name]
            if self.manifest.operators == "triton":
                described["file"] = None  # torch.export saves no program that holds a Triton kernel
            else:
                _save(emitted.program, directory / described["file"])
            if name in aot_inductor:
                described["package"] = f"{name}.aoti.pt2"
                compile_package(self, name, directory / described["package"], inductor_configs)
        self.manifest.write(directory)
        return directory


def _save(program: ExportedProgram, path: Path) -> None:
    """Without its example inputs, among which are whole pools."""
    examples = program.example_inputs
    program.example_inputs = None
    try:
        torch.export.save(program, path)
    finally:
        program.example_inputs = examples


def export_step(
    step: nn.Module | Callable,
    args: tuple,
    kwargs: dict | None = None,
    *,
    dynamic_shapes: object = None,
    functional: bool = False,
    portable: bool = False,
    triton: bool = False,
    allow_unrewritten: bool = False,
) -> ExportedStep:
    """Export a speculative step as ``torch.export`` would, with the per-position states replaced by record and commit.

    Args:
        step: module or function in plain PyTorch, as for ``torch.compile(step, backend="recoverssm")``; or one that calls
            ``recoverssm_ops`` itself. What it writes to (buffers, or tensors among its arguments) are its pools.
        args, kwargs: example inputs, in any nesting. Numbers among them become constants.
        dynamic_shapes: as for ``torch.export.export``.
        functional: pools are inputs and, with their new contents, outputs; nothing is mutated. For runtimes without
            mutation (ONNX); elsewhere it costs a copy of every pool.
        portable: the operators as plain ATen, so that the programs run without this library, at the speed of the runtime.
        triton: the operators as their Triton kernels, visible to the compiler, so that an AOTInductor package on CUDA holds
            them and needs neither this library nor Python. Such programs are compiled, not saved as programs.
        allow_unrewritten: export a step in which nothing was rewritten, too.

    Returns:
        :class:`ExportedStep` with ``.step``, ``.verify``, ``.commit``, ``.report``, ``.manifest`` and ``.save(directory)``.

    Raises:
        ValueError: both ``portable`` and ``triton``.
        NotRewrittenError: nothing was rewritten and the step calls no operator of ours; carries the report.
        ExportError: results that are not tensors. On ``.verify`` and ``.commit``: why the step has no halves.
    """
    if portable and triton:
        raise ValueError("portable and triton should not both be True: they are two forms of the operators")
    # In plain ATen the model's own convolution is as good, and a runtime may have a kernel for it.
    traced = trace_step(as_module(step), args, kwargs, dynamic_shapes, convolutions=False if portable else None)
    # A convolution is replaced by two calls; only the layers and the step's own calls count as rewritten.
    own_calls = _operator_calls(traced) > 2 * traced.report.convolutions_replaced
    if not (traced.report.matched or allow_unrewritten or own_calls):
        raise NotRewrittenError(traced.report)
    writes, copied = find_writes(traced)
    form = "triton" if triton else "portable" if portable else "recoverssm"
    emitter = Emitter(traced, writes, operator_table(form))
    whole = {node: (name, "input") for node, (name, _) in traced.inputs.items()}
    results, accepted = _results(traced, None), None
    uncut = None
    try:
        halves = cut(traced)
        accepted = halves.accepted
        results = _results(traced, accepted)
        if accepted in whole:
            whole[accepted] = (whole[accepted][0], "num_accepted")
    except ExportError as error:
        halves, uncut = None, str(error)
    pools = "functional" if functional else "buffers"
    emitted = {"step": emitter.emit(None, whole, results, pools, copied)}
    if halves is not None:
        emitted |= _halves(emitter, traced, halves, whole, results, "functional" if functional else "inputs", copied)
    layers = describe_layers(traced)
    windows = {layer["window"] for layer in layers}
    manifest = Manifest(
        window=windows.pop() if len(windows) == 1 else None,
        pools=pools if functional or any(pool.buffer for pool in traced.pools) else "inputs",
        operators=form if _operator_calls(traced) else "portable",
        device=str(next((p.device.type for p in emitted["step"].inputs), "cpu")),
        layers=layers,
        dims=_dims(emitted.values()),
        programs={name: describe_program(name, e) for name, e in emitted.items()},
        uncut=uncut,
    )
    return ExportedStep(traced.report, manifest, emitted)


def _halves(emitter: Emitter, traced: StepGraph, halves: Cut, whole, results, pools: str, copied) -> dict[str, Emitted]:
    carried = {name: ("record", node) for node, name in halves.carried.items()}
    before = {node: port for node, port in whole.items() if node in halves.verify}
    verify = emitter.emit(halves.verify, before, results | carried, "inputs", [])
    name = whole[halves.accepted][0] if halves.accepted in whole else "num_accepted"
    after = {halves.accepted: (name, "num_accepted")}
    after |= {node: port for node, port in whole.items() if node in halves.commit and node is not halves.accepted}
    after |= {node: (name, "record") for node, name in halves.carried.items()}
    return {"verify": verify, "commit": emitter.emit(halves.commit, after, {}, pools, copied)}


def _results(traced: StepGraph, accepted: Node | None) -> dict[str, tuple[str, Node]]:
    return {
        f"result_{i}": ("num_accepted" if node is accepted else "result", node) for i, node in enumerate(traced.results)
    }


def _operator_calls(traced: StepGraph) -> int:
    return sum(
        node.target in OPERATORS or (node.args and node.args[0] in OPERATORS)
        for node in traced.graph.nodes
        if node.op == "call_function"
    )


def _dims(emitted) -> dict[str, list]:
    """Ranges as the exported programs have them: exporting may have narrowed what was asked for."""
    found: dict[str, list] = {}
    for program in emitted:
        names = [
            spec.arg.name for spec in program.program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"
        ]
        nodes = {node.name: node for node in program.program.graph.find_nodes(op="placeholder")}
        for port, name in zip(program.inputs, names, strict=True):
            for size, new in zip(port.shape, nodes[name].meta["val"].shape, strict=True):
                if isinstance(size, str) and isinstance(new, torch.SymInt):
                    bounds = program.program.range_constraints.get(new.node.expr)
                    if bounds is not None:
                        found[size] = [
                            int(x) if getattr(x, "is_Integer", False) else None for x in (bounds.lower, bounds.upper)
                        ]
    return found

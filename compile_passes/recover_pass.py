"""The pass as Inductor sees it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

import recoverssm_ops.conv_ops as conv_ops
import recoverssm_ops.layers_ops as layers_ops
import recoverssm_ops.ops as ops
from compile_passes.reporting.report import Report
from compile_passes.rewrite import rewrite

_COMMITS = (
    ops.kda_commit,
    layers_ops.kda_commit_layers,
    conv_ops.causal_conv1d_commit,
    layers_ops.causal_conv1d_commit_layers,
)


class RecoverSSMPass(CustomGraphPass):
    """Replaces per-position states by record and commit.

    Use it through :func:`compile_passes.recoverssm_passes`, ``torch.compile(..., backend="recoverssm")``, or directly::

        torch.compile(step, options={"post_grad_custom_pre_pass": RecoverSSMPass()})

    A compile cache hit skips the pass, so nothing a program relies on happens in it; ``reports`` (and ``last_report``) are for
    inspection of the graphs that were really compiled. :func:`compile_passes.explain` reports whatever the caches hold.

    Args:
        then: a pass that was installed in the same slot; it runs first. (A slot holds one pass before torch 2.13.)
        merge_layers: commit all layers that are alike in one launch. None (default): where the pools are on CUDA; a CPU gains
            nothing by it.
        convolutions: put the operators in the place of short convolutions and their histories' updates, too. None: where the
            pools are on CUDA; on the CPU the compiler's own code is faster.
        check: compare every rewritten layer and convolution with the original, on random inputs in float64 on the CPU, and
            raise :class:`RewriteCheckError` where they differ. It costs the states of all window positions in float64, a layer
            at a time, and looks at no tensor of the model. A compile cache hit was checked when it was made.
    """

    def __init__(
        self,
        then: object = None,
        *,
        merge_layers: bool | None = None,
        check: bool = False,
        convolutions: bool | None = None,
    ):
        self.then = then
        self.convolutions = convolutions
        self.merge_layers = merge_layers
        self.check = check
        self.reports: list[Report] = []

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        check_views(graph)
        report = rewrite(graph, merge_layers=self.merge_layers, check=self.check, convolutions=self.convolutions)
        self.reports.append(report)

    @property
    def last_report(self) -> Report | None:
        return self.reports[-1] if self.reports else None

    @property
    def others(self) -> tuple:
        if self.then is None:
            return ()
        return tuple(self.then) if isinstance(self.then, (list, tuple)) else (self.then,)

    def uuid(self) -> object | None:
        """Sources, schemas, torch's version and the options; None (no caching) if a pass beside ours cannot say what it is."""
        uuids = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in uuids else (self._hash(), *uuids)

    def _hash(self) -> str:
        """Of everything that decides what the pass produces; schemas are not part of Inductor's own key."""
        digest = hashlib.sha256(f"{torch.__version__} {self.merge_layers} {self.check} {self.convolutions}".encode())
        # The gate's formulas are traced into graphs, where there is no operator for them.
        for path in (*sorted(Path(__file__).parent.rglob("*.py")), Path(ops.__file__).parent / "gates.py"):
            digest.update(path.read_bytes())
        for schema in (*ops.SCHEMAS, *layers_ops.SCHEMAS, *conv_ops.SCHEMAS):
            digest.update(schema.encode())
        return digest.hexdigest()


def check_views(graph: Graph) -> None:
    """Refuse a form that Inductor compiles wrongly: a commit into a view whose storage offset is symbolic.

    It would be written at offset 0 (pytorch/pytorch#198068). ``test_symbolic_view_is_refused`` tells when it is mended.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or node.args[0] not in _COMMITS:
            continue
        offsets = (value for name, value in node.kwargs.items() if name.endswith("_storage_offset"))
        if any(isinstance(offset, Node) for offset in offsets):
            raise RuntimeError(
                f"{node.name}: {node.args[0]._opname} into a view of the pool at a symbolic storage offset (pool[layer] under "
                "dynamic=True) would be written at offset 0 by torch's Inductor. Pass the whole pool with slot numbers "
                "that include the layer, keep one pool a layer, or slice the pool outside the compiled function."
            )

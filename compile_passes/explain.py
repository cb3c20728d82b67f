"""Ask the pass what it would do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from compile_passes.reading.index_notation import size_hint
from compile_passes.recover_pass import check_views
from compile_passes.reporting.report import Report
from compile_passes.rewrite import rewrite


def explain(fn: Callable, *args, dynamic: bool | None = None, **kwargs) -> Report:
    """Trace ``fn`` as ``torch.compile`` would, up to the pass, and report layer by layer what is rewritten.

    No kernel is generated and none is run: inputs, buffers and pools keep their values. Where ``fn`` has several graphs, the
    later ones are traced with zeros in place of the results of the earlier ones, and what stands between them is run: arguments
    and the module's tensors are then copied beforehand, and restored.

    Args:
        fn: a function or module, as for ``torch.compile``.
        args, kwargs: example inputs.
        dynamic: as for ``torch.compile``.

    Returns:
        :class:`Report`; ``str(report)`` is a table, ``report.layers`` the same as data.
    """
    report = Report()

    def inner_compile(gm: GraphModule, example_inputs: list, **settings):
        # Nested regions are graphs of their own, before the one that calls them.
        for module in reversed([m for m in gm.modules() if isinstance(m, GraphModule)]):
            view_to_reshape(module)
            check_views(module.graph)
            found = rewrite(module.graph)
            report.layers += found.layers
            report.convolutions += found.convolutions
        (outputs,) = gm.graph.find_nodes(op="output")
        results = torch.fx.map_arg(outputs.args[0], lambda node: _zeros(node.meta["val"]))

        def run_nothing(inputs: list) -> list:
            inputs.clear()
            return [x.clone() if isinstance(x, Tensor) else x for x in results]

        run_nothing._boxed_call = True
        return run_nothing

    def backend(gm: GraphModule, inputs: list):
        # Neither cache may answer: the pass has to run, and the dummy results must not be kept.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches={"fx_graph_cache": False})

    def traced(*args, **kwargs):
        return fn(*args, **kwargs)

    # A code object of its own keeps this trace out of the caches of ``fn``; and no count of earlier traces may make Dynamo
    # give up and run the function instead, which would write its pools.
    traced.__code__ = traced.__code__.replace(co_name="explained")
    unlimited = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    with torch.no_grad(), torch._dynamo.config.patch(**unlimited):
        try:
            torch.compile(traced, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
        except TorchDynamoException:
            # Not one graph. Dynamo runs what it cannot trace, a whole window where the break is in its loop.
            report.layers.clear()
            report.convolutions.clear()
            with _restored(_tensors(fn, args, kwargs)):
                torch.compile(traced, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return report


def _tensors(fn: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    held = [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []
    return [x for x in (*pytree.tree_leaves((args, kwargs)), *held) if isinstance(x, Tensor)]


@contextmanager
def _restored(tensors: list[Tensor]) -> Iterator[None]:
    """Whatever is written to ``tensors`` inside is undone."""
    saved = [(x, x.clone()) for x in tensors]
    try:
        yield
    finally:
        for x, value in saved:
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                x.copy_(value)


def _zeros(value: object) -> object:
    if not isinstance(value, Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    sizes, strides = ([size_hint(n) for n in part] for part in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()

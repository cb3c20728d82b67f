"""``kda_verify`` as a quick plugin, for the standard TensorRT build; TensorRT-RTX takes no plugins.

A plugin's inputs are tensors that are there, so every set of the operator's optional tensors is a plugin of its own,
registered when a network first needs it. Attributes are numbers. The descriptor says what TensorRT cannot know: of the two
outputs, both shaped like ``v``, the first has the dtype of ``v`` and the corrections are float32.

The plugin runs in Python, in the process that built the engine.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recoverssm_ops import ops

_ARGUMENTS = ops.kda_verify._schema.arguments
_TENSORS = [a.name for a in _ARGUMENTS if "Tensor" in str(a.type)]
_OPTIONAL = [a.name for a in _ARGUMENTS if "Optional" in str(a.type) or str(a.type).endswith("?")]
# Flags as 0 and 1: a field of a plugin is an array of numbers.
_ATTRIBUTES = {a.name: float if str(a.type) == "float" else int for a in _ARGUMENTS if a.name not in _TENSORS}
_DTYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64
}  # fmt: skip
_CONVERTED = False


def available() -> bool:
    """Whether the TensorRT that Torch-TensorRT uses has quick plugins."""
    try:
        importlib.import_module("torch_tensorrt")  # with TensorRT-RTX it puts that in the place of tensorrt
        importlib.import_module("tensorrt.plugin")
    except ImportError:
        return False
    return True


def register() -> None:
    """Teach Torch-TensorRT to convert ``torch.ops.recoverssm.kda_verify`` into a plugin; once a process."""
    global _CONVERTED
    if not _CONVERTED:
        from torch_tensorrt.dynamo.conversion import dynamo_tensorrt_converter

        dynamo_tensorrt_converter(ops.kda_verify, supports_dynamic_shapes=True)(convert)
        _CONVERTED = True


def convert(ctx: Any, target: object, args: tuple, kwargs: dict, name: str) -> tuple:
    """The converter: a plugin layer's two outputs, in the order of the operator's."""
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

    values = dict(zip((a.name for a in _ARGUMENTS), args, strict=True))
    tensors = tuple(tensor for tensor in _TENSORS if values[tensor] is not None)
    inputs = [get_trt_tensor(ctx, values[tensor], f"{name}_{tensor}") for tensor in tensors]
    attributes = {key: kind(values[key]) for key, kind in _ATTRIBUTES.items()}
    layer = ctx.net.add_plugin(plugin(tensors)(*inputs, **attributes), aot=False)
    if layer is None:
        raise RuntimeError(f"TensorRT made no plugin layer of {name} ({target})")
    layer.name = f"[{target}]-[{name}]"
    return layer.get_output(0), layer.get_output(1)


def plugin(tensors: tuple[str, ...]) -> Callable:
    """What makes instances of the plugin for these inputs, which it registers at the first call."""
    import tensorrt.plugin as quick

    present = [tensor for tensor in _OPTIONAL if tensor in tensors]
    name = "_".join(["kda_verify", *present])
    namespace = getattr(quick.op, "recoverssm", None)
    if namespace is None or not hasattr(namespace, name):
        quick.register(f"recoverssm::{name}")(_descriptor(tensors))
        quick.impl(f"recoverssm::{name}")(_implementation(tensors))
    return getattr(quick.op.recoverssm, name)


def _descriptor(tensors: tuple[str, ...]) -> Callable:
    import tensorrt
    import tensorrt.plugin as quick

    signature = _signature(tensors, quick.TensorDesc, [], tuple[quick.TensorDesc, quick.TensorDesc])

    def describe(*values: object, **named: object) -> tuple:
        v = signature.bind(*values, **named).arguments["v"]
        o, u = v.like(), v.like()
        u.dtype = tensorrt.float32
        return o, u

    describe.__signature__ = signature
    return describe


def _implementation(tensors: tuple[str, ...]) -> Callable:
    import tensorrt.plugin as quick

    own = [("outputs", tuple[quick.Tensor, quick.Tensor]), ("stream", int)]
    signature = _signature(tensors, quick.Tensor, own, None)

    def run(*values: object, **named: object) -> None:
        given = signature.bind(*values, **named).arguments
        values = {name: as_torch(x) if name in tensors else x for name, x in given.items()}
        values |= {a.name: bool(values[a.name]) for a in _ARGUMENTS if str(a.type) == "bool"}
        arguments = [values.get(a.name) for a in _ARGUMENTS]
        with on_stream(given["stream"]):
            for held, result in zip(given["outputs"], ops.kda_verify(*arguments), strict=True):
                as_torch(held).copy_(result)

    run.__signature__ = signature
    return run


def _signature(
    tensors: tuple[str, ...], kind: type, own: list[tuple[str, object]], result: object
) -> inspect.Signature:
    """TensorRT reads a plugin's inputs, attributes and number of outputs off the function's signature."""
    parameters = [*((tensor, kind) for tensor in tensors), *_ATTRIBUTES.items(), *own]
    return inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=t) for n, t in parameters],
        return_annotation=result,
    )


def on_stream(stream: int) -> torch.cuda.StreamContext:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def as_torch(x: Any) -> Tensor:
    """A plugin's dense tensor where it is. Through integers: the interface of CUDA arrays knows no bfloat16."""
    dtype = _DTYPES[x.dtype.name]
    array = SimpleNamespace(
        __cuda_array_interface__={
            "shape": tuple(x.shape),
            "typestr": f"<i{dtype.itemsize}",
            "data": (x.data_ptr, False),
            "strides": None,
            "version": 3,
        }
    )
    return torch.as_tensor(array, device="cuda").view(dtype)

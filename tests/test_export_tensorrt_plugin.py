"""The quick plugin of verify, against a stand-in for the part of TensorRT that it touches: TensorRT needs a GPU.

The stand-in reads a plugin's inputs, attributes and outputs off its signature, as ``tensorrt.plugin`` does.
"""

import copy
import inspect
import sys
import typing
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from exporting import Operators
from test_export_step import function_inputs

import recoverssm_ops.tensorrt
from recoverssm_ops import ops, tensorrt_plugin


class TensorDesc:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def like(self):
        return copy.copy(self)


class Plugin:
    """A registered plugin; a call makes an instance of it."""

    def __init__(self, describe):
        signature = inspect.signature(describe)
        assert all(p.default is inspect.Parameter.empty for p in signature.parameters.values())
        kinds = [p.annotation for p in signature.parameters.values()]
        self.tensors = [name for name, p in signature.parameters.items() if p.annotation is TensorDesc]
        self.attributes = {n: p.annotation for n, p in signature.parameters.items() if p.annotation is not TensorDesc}
        assert kinds[: len(self.tensors)] == [TensorDesc] * len(self.tensors), "tensors come first"
        assert set(self.attributes.values()) <= {int, float}
        assert typing.get_origin(signature.return_annotation) is tuple
        self.num_outputs, self.describe = len(typing.get_args(signature.return_annotation)), describe

    def implement(self, run):
        assert [*inspect.signature(run).parameters] == [*self.tensors, *self.attributes, "outputs", "stream"]
        self.run = run

    def __call__(self, *tensors, **attributes):
        assert len(tensors) == len(self.tensors)
        assert {name: type(value) for name, value in attributes.items()} == self.attributes
        return SimpleNamespace(plugin=self, tensors=tensors, attributes=attributes)


@pytest.fixture
def quick(monkeypatch):
    """Modules ``tensorrt`` and ``tensorrt.plugin``, and what the converter needs of Torch-TensorRT."""
    tensorrt, plugins = ModuleType("tensorrt"), ModuleType("tensorrt.plugin")
    tensorrt.float32, tensorrt.plugin, plugins.op = "float32", plugins, SimpleNamespace()
    plugins.TensorDesc, plugins.Tensor = TensorDesc, torch.Tensor

    def register(name):
        namespace, name = name.split("::")
        if not hasattr(plugins.op, namespace):
            setattr(plugins.op, namespace, SimpleNamespace())
        return lambda describe: setattr(getattr(plugins.op, namespace), name, Plugin(describe))

    def impl(name):
        namespace, name = name.split("::")
        return getattr(getattr(plugins.op, namespace), name).implement

    plugins.register, plugins.impl = register, impl
    modules = {"tensorrt": tensorrt, "tensorrt.plugin": plugins, "torch_tensorrt": ModuleType("torch_tensorrt")}
    for name in ("dynamo", "dynamo.conversion", "dynamo.conversion.converter_utils"):
        modules[f"torch_tensorrt.{name}"] = ModuleType(f"torch_tensorrt.{name}")
    modules["torch_tensorrt.dynamo.conversion.converter_utils"].get_trt_tensor = lambda ctx, x, name: x
    converters = {}
    modules["torch_tensorrt.dynamo.conversion"].dynamo_tensorrt_converter = lambda target, supports_dynamic_shapes: (
        lambda convert: converters.setdefault(target, convert)
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tensorrt_plugin, "_CONVERTED", False)
    monkeypatch.setattr(tensorrt_plugin, "as_torch", lambda x: x)
    monkeypatch.setattr(tensorrt_plugin, "on_stream", lambda stream: nullcontext())
    return SimpleNamespace(plugins=plugins, converters=converters)


OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def verify_call(program):
    (node,) = program.graph.find_nodes(op="call_function", target=ops.kda_verify)
    return node


def test_the_operator_is_left_to_the_plugin_and_the_rest_is_lowered():
    exported = torch.export.export(Operators(**OPTIONS), function_inputs())
    lowered = recoverssm_ops.tensorrt.lower(exported, plugin=True)
    names = [str(node.target) for node in lowered.graph.nodes if "recoverssm" in str(node.target)]
    assert names == ["recoverssm.kda_verify.default"]


def test_a_network_gets_a_layer_with_both_outputs_and_their_dtypes(quick):
    given = function_inputs()
    exported = torch.export.export(Operators(**OPTIONS), given)
    lowered = recoverssm_ops.tensorrt.lower(exported, plugin=True)
    node = verify_call(lowered)
    values = dict(zip((n.name for n in lowered.graph.find_nodes(op="placeholder")), given, strict=True))
    arguments = tuple(values.get(getattr(a, "name", None), a) for a in node.args)
    made = []

    def add_plugin(instance, aot):
        made.append(instance)
        return SimpleNamespace(get_output=lambda i: ("output", i))

    tensorrt_plugin.register()
    context = SimpleNamespace(net=SimpleNamespace(add_plugin=add_plugin))
    convert = quick.converters[ops.kda_verify]
    assert convert(context, ops.kda_verify, arguments, {}, "verify") == (("output", 0), ("output", 1))
    (instance,) = made

    # What TensorRT asks before it builds: outputs like v, the second float32 whatever v is.
    described = [TensorDesc(x.shape, "bfloat16") for x in instance.tensors]
    o, u = instance.plugin.describe(*described, *instance.attributes.values())
    v = arguments[2]
    assert (o.shape, o.dtype, u.shape, u.dtype) == (v.shape, "bfloat16", v.shape, "float32")

    # And when the engine runs.
    expected = ops.kda_verify(*arguments)
    outputs = tuple(torch.full_like(x, torch.nan) for x in expected)
    instance.plugin.run(*instance.tensors, *instance.attributes.values(), outputs=outputs, stream=0)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))


def test_every_set_of_optional_tensors_is_a_plugin_of_its_own(quick):
    required = [name for name in tensorrt_plugin._TENSORS if name not in tensorrt_plugin._OPTIONAL]
    bare, gated = tensorrt_plugin.plugin((*required,)), tensorrt_plugin.plugin((*required, "A_log", "dt_bias"))
    assert bare is not gated and len(gated.tensors) == len(bare.tensors) + 2
    assert tensorrt_plugin.plugin((*required,)) is bare
    assert {*vars(quick.plugins.op.recoverssm)} == {"kda_verify", "kda_verify_A_log_dt_bias"}


@pytest.mark.parametrize("plugin", [None, True, False])
def test_where_there_are_no_quick_plugins_the_portable_form_is_used(quick, monkeypatch, plugin):
    """As TensorRT-RTX, which stands in tensorrt's place."""
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    received = []
    dynamo = sys.modules["torch_tensorrt.dynamo"]
    dynamo.compile = lambda program, arg_inputs, **options: received.append(program)
    sys.modules["torch_tensorrt"].dynamo = dynamo
    given = function_inputs()
    exported = torch.export.export(Operators(**OPTIONS), given)
    if plugin:
        with pytest.raises(ImportError, match=r"plugin=True needs the quick plugins"):
            recoverssm_ops.tensorrt.compile(exported, given, plugin=plugin)
        return
    recoverssm_ops.tensorrt.compile(exported, given, plugin=plugin)
    assert "recoverssm" not in str(received[0].graph) and not quick.converters


def test_where_there_are_quick_plugins_one_is_used(quick):
    received = []
    dynamo = sys.modules["torch_tensorrt.dynamo"]
    dynamo.compile = lambda program, arg_inputs, **options: received.append(program)
    sys.modules["torch_tensorrt"].dynamo = dynamo
    given = function_inputs()
    recoverssm_ops.tensorrt.compile(torch.export.export(Operators(**OPTIONS), given), given)
    assert verify_call(received[0]) and [*quick.converters] == [ops.kda_verify]

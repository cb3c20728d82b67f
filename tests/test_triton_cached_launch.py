"""Kernels found again without Triton's binder, without a GPU: Triton compiles nothing and launches are noted.

The reference is Triton's own launch of the same arguments: a remembered one must pass the same values to the same kernel.
"""

import os
import types

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under the interpreter nothing is launched", allow_module_level=True)

import triton
from programs import NAMES, launch_as
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from benchmarks import kernel_variants as variants
from recoverssm_ops.triton import cached_launch, configs, launch, launch_conv, launch_layers

TARGET = GPUTarget("cuda", 90, 32)
MODULES = (launch, launch_conv, launch_layers)


class NotedKernel(CompiledKernel):
    """Compiled from ``src`` in name only; ``run`` notes the arguments that reach the GPU."""

    run = None  # a property of the parent, which would load the kernel

    def __init__(self, src, target, noted):
        self.metadata = types.SimpleNamespace(target=target)
        self.src, self.function, self.packed_metadata = src, object(), object()
        constant = [kind == "constexpr" for kind in src.signature.values()]

        def run(x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
            assert len(arguments) == len(constant) and (function, metadata) == (self.function, self.packed_metadata)
            given = [a for a, known in zip(arguments, constant, strict=True) if not known]
            noted.append((self, (x, y, z), stream, [a.data_ptr() if torch.is_tensor(a) else a for a in given]))

        self.run = run

    def launch_metadata(self, *arguments):
        return None

    def __del__(self):
        """Nothing was loaded."""


class Gpu:
    """``launches``: (kernel, grid, stream, arguments) of each; ``bound``: how many of them Triton's binder made."""

    def __init__(self):
        self.launches, self.bound, self.stream = [], 0, 7


@pytest.fixture
def gpu(monkeypatch):
    gpu, run = Gpu(), JITFunction.run
    device = object()  # kernels "compiled" here are nobody else's
    fake = types.SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: gpu.stream,
        get_current_target=lambda: TARGET,
    )

    def counted(self, *arguments, **keywords):
        gpu.bound += 1
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(triton.compiler, "compile", lambda src, target, **_: NotedKernel(src, target, gpu.launches))
    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(cached_launch, "_known", {})
    yield gpu
    for module in MODULES:
        for x in vars(module).values():
            if isinstance(x, JITFunction):
                x.device_caches.pop(device, None)


CALLS = {
    "verify": (variants.verify, {"pool": "bf16"}),
    "verify fp32": (variants.verify, {"pool": "fp32", "T": 1}),
    "verify packed": (variants.verify, {"pool": "bf16", "packed": True, "groups": 2}),
    "verify unbounded": (variants.verify, {"pool": "bf16", "bounded": False}),
    "verify unaligned": (variants.verify, {"pool": "fp32", "aligned": False}),
    "verify scalar": (variants.verify, {"pool": "fp16", "bounded": False, "scalar_gate": True}),
    "commit": (variants.commit, {"pool": "bf16"}),
    "commit few": (variants.commit, {"pool": "bf16", "batch": variants.FEW_ROWS}),
    "commit columns": (variants.commit, {"pool": "fp32", "columns": 3, "packed": True, "bounded": False}),
    "recover": (variants.recover, {"pool": "bf16"}),
    "conv_verify": (variants.conv_verify, {"data": "bf16"}),
    "conv_verify packed": (variants.conv_verify, {"data": "fp32", "bias": True, "packed": True, "pool": "strided"}),
    "conv_commit": (variants.conv_commit, {"data": "bf16"}),
    "conv_commit columns": (variants.conv_commit, {"data": "fp32", "columns": 3, "packed": True}),
    "commit_layers": (variants.commit_layers, {"pool": "bf16", "layers": 2}),
    "commit_layers columns": (variants.commit_layers, {"pool": "fp32", "layers": 2, "columns": 3}),
    "conv_commit_layers": (variants.conv_commit_layers, {"data": "bf16", "layers": 2}),
}


@pytest.mark.parametrize(("variant", "setting"), CALLS.values(), ids=CALLS)
def test_a_remembered_launch_passes_what_triton_passes(gpu, variant, setting, monkeypatch):
    variant(**setting)()
    assert gpu.bound == 1
    gpu.launches.clear()

    def both(*described):
        cached_launch.launch_described(*described)
        assert gpu.bound == 2
        cached_launch.relaunch(*described)
        assert gpu.bound == 2, "the second launch should be found again"

    for module in MODULES:
        monkeypatch.setattr(module, "relaunch", both)
    variant(**setting)()
    by_triton, remembered = gpu.launches
    assert by_triton == remembered


def conv_commit(gpu, **changed):
    """How many of one more commit's launches Triton bound."""
    setting = {"data": "bf16", "D": 64} | changed
    bound = gpu.bound
    variants.conv_commit(**setting)()
    return gpu.bound - bound


@pytest.mark.parametrize(
    "changed", ({"T": 4}, {"D": 96}, {"data": "fp32"}, {"state": "fp32"}, {"pool": "strided"}), ids=str
)
def test_another_layout_is_bound_anew(gpu, changed):
    assert [conv_commit(gpu), conv_commit(gpu), conv_commit(gpu, **changed), conv_commit(gpu)] == [1, 0, 1, 0]


def make_verify(**changed):
    """Arguments of ``launch.verify`` by name, for one row and one head."""
    tensors = {name: torch.zeros(1, 4, 1, 32) for name in "qkvg"}
    tensors |= {
        "beta": torch.zeros(1, 4, 1),
        "state": torch.zeros(2, 1, 32, 32),
        "state_indices": torch.zeros(1, dtype=torch.int32),
    }
    tensors |= {"cu_seqlens": None, "max_seqlen": 4, "A_log": None, "dt_bias": None}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    return tensors | {"lower_bound": -5.0, "scale": 1.0} | dict.fromkeys(flags, True) | {"pad_slot_id": -1} | changed


def off_by_one(shape):
    return torch.zeros(torch.Size(shape).numel() + 1)[1:].view(shape)


@pytest.mark.parametrize(
    "changed",
    (
        {"g": off_by_one((1, 4, 1, 32))}, {"dt_bias": torch.zeros(1, 32)}, {"A_log": torch.zeros(1)}, {"scale": 0.5},
        {"lower_bound": 0.0}, {"pad_slot_id": 0}, {"allow_neg_eigval": False}, {"use_qk_l2norm_in_kernel": False},
        {"state_indices": torch.zeros(1, dtype=torch.int64)}, {"state_indices": None}, {"beta": torch.zeros(1, 4, 2)[..., :1]},
        {"v": torch.zeros(1, 4, 1, 32).bfloat16()},
    ),
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_argument_of_verify_tells_launches_apart(gpu, changed):
    for expected, arguments in ((1, {}), (1, {}), (2, changed), (2, changed), (2, {})):
        launch.verify(**make_verify(**arguments))
        assert gpu.bound == expected


def test_a_tensor_in_two_places_is_not_one_place(gpu):
    x = torch.ones(1, 4, 1, 32)
    launch.verify(**make_verify(q=x, k=x, v=x))
    given = make_verify()
    launch.verify(**given)
    assert gpu.bound == 1
    assert gpu.launches[-1][3][:6] == [given[name].data_ptr() for name in ("q", "k", "v", "g", "beta", "state")]


def test_copies_are_made_at_every_launch(gpu):
    """What is not contiguous in its last axis is copied, and the copies' addresses are passed."""
    for _ in range(2):
        q = torch.zeros(1, 4, 1, 64)[..., ::2]
        launch.verify(**make_verify(q=q, dt_bias=torch.zeros(32, 1).mT))
        assert gpu.launches[-1][3][0] != q.data_ptr()
    assert gpu.bound == 1


def test_a_copy_within_a_description_is_not_remembered(gpu):
    def describe(x, y):
        return cached_launch.Launch(function, (1,), (x, y.contiguous()), (), {})

    function = triton.jit(two_tensors)
    for y, bound in ((torch.zeros(2, 2), 1), (torch.ones(2, 2), 1), (torch.zeros(2, 2).T, 2), (torch.ones(2, 2).T, 3)):
        cached_launch.relaunch(describe, (torch.zeros(1), y), ())
        assert gpu.bound == bound


def two_tensors(x, y):
    pass


def test_launches_go_to_the_current_stream(gpu):
    conv_commit(gpu)
    gpu.stream = 8
    assert conv_commit(gpu) == 0
    assert [stream for _, _, stream, _ in gpu.launches] == [7, 8]


def test_replaced_choices_of_the_launchers_are_seen(gpu, monkeypatch):
    """Benchmarks and tests try others in one process."""
    few = {"pool": "bf16", "batch": variants.FEW_ROWS}
    calls = (
        lambda: launch.verify(**make_verify()),
        variants.commit(**few),
        variants.recover("fp32"),
        variants.conv_commit("bf16"),
    )
    for call in calls:
        call()
    chosen = [kernel for kernel, *_ in gpu.launches]
    gpu.launches.clear()
    launch_as("many", monkeypatch)
    monkeypatch.setattr(launch, "MAX_FACTORED_EXPONENT", -1.0)
    configs_of = {
        module: getattr(module, name) for module, name in ((launch, "commit_config"), (launch_conv, "conv_config"))
    }
    monkeypatch.setattr(launch, "commit_config", lambda *sizes: configs_of[launch](*sizes) | {"num_warps": 8})
    monkeypatch.setattr(launch_conv, "conv_config", lambda *sizes: configs_of[launch_conv](*sizes) | {"num_warps": 8})
    for call in calls:
        call()
    assert not any(kernel in chosen for kernel, *_ in gpu.launches)


def test_other_limits_of_the_launch_table_are_other_choices(gpu, monkeypatch):
    calls = (lambda: launch.verify(**make_verify()), variants.commit("bf16"), variants.recover("fp32"))
    for call in calls:
        call()
        for name in NAMES:
            bound = gpu.bound
            monkeypatch.setattr(configs, name, getattr(configs, name) + 1)
            call()
            assert gpu.bound == bound + 1


def test_a_kernel_that_is_withheld_is_not_found_again(gpu, monkeypatch):
    calls = (lambda: launch.verify(**make_verify()), variants.commit("bf16"))
    for call in calls:
        call()
    monkeypatch.setattr(launch, "_fits_gluon", lambda *_: False)
    for call in calls:
        call()
    names = ["verify_async_kernel", "commit_rows_kernel", "verify_kernel", "commit_kernel"]
    assert [kernel.src.fn.__name__ for kernel, *_ in gpu.launches] == names


def test_where_somebody_watches_triton_launches(gpu, monkeypatch):
    conv_commit(gpu)
    entered = []
    for module, name, watching in (
        (knobs.runtime, "launch_enter_hook", entered.append),
        (knobs.runtime, "launch_exit_hook", entered.append),
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "some"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, watching)
            assert conv_commit(gpu) == 1, name
        assert conv_commit(gpu) == 0, name


def test_hooks_in_a_chain_are_seen(gpu):
    conv_commit(gpu)
    hook = print
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert conv_commit(gpu) == 1
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert conv_commit(gpu) == 0


def test_hooks_of_a_kernel_are_run(gpu, monkeypatch):
    conv_commit(gpu)
    ran = []
    monkeypatch.setattr(launch_conv.conv_commit_kernel, "pre_run_hooks", [lambda *_, **__: ran.append(1)])
    assert (conv_commit(gpu), ran) == (1, [1])


def test_a_version_that_is_not_known_binds_every_launch(gpu, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    assert [conv_commit(gpu), conv_commit(gpu)] == [1, 1]


def test_another_backend_binds_every_launch(gpu, monkeypatch):
    conv_commit(gpu)
    (known,) = cached_launch._known.values()
    assert cached_launch._as_expected(known.function, known.kernel)
    known.kernel.metadata.target = GPUTarget("hip", "gfx942", 64)
    assert not cached_launch._as_expected(known.function, known.kernel)


def test_the_memory_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(cached_launch, "MOST_LAYOUTS", 2)
    for T in (1, 2, 3):
        conv_commit(gpu, T=T)
    assert len(cached_launch._known) == 1
    assert [conv_commit(gpu, T=T) for T in (3, 1, 3)] == [0, 1, 0]

"""The Gluon kernels' compiled code on the CPU, in every dtype: what Triton's interpreter cannot run (``ptx_emulator``).

The cases, checks and budgets are those of the tests on a GPU. "Many" programs and "few" are launched differently.
"""

import os
from types import SimpleNamespace

import budget
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import kernel_cases
import kernel_checks as checks
import layers_kernel_checks as layers_checks
from kernel_cases import CASES, Case, build, check_verify
from ptx_emulator.launches import emulated
from test_triton_cuda import DTYPES, LARGE

from recoverssm_ops.triton import configs, launch_layers

BY_NAME = {case.name: case for case in (*CASES, *LARGE)}
FEW = {"few": configs.FEW_PROGRAMS, "many": 0}
# Every kernel, dtype, and branch of the kernels' constants at least once: tokens in one block or two, operands held or not,
# one to four buffers, two to eight warps, rows of one tile or several, and cut off, two pieces of one buffer.
COVERING = [
    ("window_128", "bf16", "many"),
    ("window_128", "fp32", "many"),
    ("bounded_64_packed", "fp16", "many"),
    ("bounded_112_160", "fp32_data_bf16_pool", "many"),
    ("padding_packed", "bf16", "many"),
    ("no_slots", "bf16", "many"),
    ("neg_eigval", "bf16_data_fp32_pool", "many"),
    ("size_256_packed", "bf16", "many"),
    ("size_144_160", "bf16_data_fp32_pool", "many"),
    ("window_12_packed", "bf16", "many"),
    ("window_16_floor", "fp16", "many"),
    ("window_16_size_256", "fp32", "many"),
    ("bounded_64_packed", "bf16", "few"),
    ("window_128", "fp32", "few"),
    ("window_1", "bf16", "few"),
    ("size_192", "fp32_data_bf16_pool", "few"),
    ("window_16", "bf16", "few"),
    ("window_16_repeated_keys", "fp16", "few"),
]


def is_gluon(case: Case) -> bool:
    """By settings and sizes; that the Gluon kernel was launched is asserted where it was expected."""
    return (
        case.gate in ("bounded", "floor") and case.l2norm and not case.scalar_gate and not case.strided
        and case.K % 16 == 0 and case.V % 32 == 0 and (case.V % 64 == 0 or case.K <= 128 or case.T <= 8)
    )  # fmt: skip


REST = [
    (name, dtypes, programs)
    for name, case in BY_NAME.items()
    for dtypes in DTYPES
    for programs in FEW
    if is_gluon(case) and (name, dtypes, programs) not in COVERING
]


@pytest.fixture(autouse=True)
def budget_of_a_gpu(monkeypatch):
    """The matrix unit's operands are as short here as there."""

    def slack(state):
        return budget.verify_slack(SimpleNamespace(is_cuda=True, dtype=state.dtype, shape=state.shape))

    monkeypatch.setattr(kernel_cases, "verify_slack", slack)


@pytest.fixture
def full_gpu(monkeypatch):
    monkeypatch.setattr(configs, "FEW_PROGRAMS", 0)


def parity(name, dtypes, programs, monkeypatch):
    monkeypatch.setattr(configs, "FEW_PROGRAMS", FEW[programs])
    case = BY_NAME[name]
    with emulated() as emulator:
        check_verify(build(case, "cpu", *DTYPES[dtypes]))
    assert emulator.kernels == ["verify_async_kernel"]


@pytest.mark.parametrize(("name", "dtypes", "programs"), COVERING)
def test_verify(name, dtypes, programs, monkeypatch):
    parity(name, dtypes, programs, monkeypatch)


LATER = [pytest.param(arch, marks=pytest.mark.exhaustive) for arch in (100, 120)]


@pytest.mark.parametrize("arch", (80, *LATER))
def test_other_architectures(arch, full_gpu):
    """The compiler has other instructions to choose from: no ``stmatrix`` before sm_90."""
    x = build(BY_NAME["bounded_64_packed"], "cpu", torch.bfloat16, torch.bfloat16)
    with emulated(arch) as emulator:
        u = check_verify(x)
        kernel_cases.check_states(x, u, [7, 0, 2, 1])
    assert emulator.kernels == ["verify_async_kernel", "commit_async_kernel"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtypes", "programs"), REST)
def test_verify_of_everything(name, dtypes, programs, monkeypatch):
    parity(name, dtypes, programs, monkeypatch)


COMMITS = [
    Case("packed_unbounded", 7, K=64, V=64, H=2, HV=4, gate="unbounded", lengths=(7, 0, 3, 1), tail=5, padding=(2,)),
    Case("cut_off_bounded", 5, K=112, V=96, padding=(0,)),
    Case("raw_decay", 8, K=128, V=128, gate="none", l2norm=False),
]


@pytest.mark.parametrize(
    ("case", "data"), list(zip(COMMITS, ("bf16", "bf16", "fp32"), strict=True)), ids=lambda x: getattr(x, "name", x)
)
def test_commit(case, data, full_gpu):
    commit_parity(case, data)


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ("bf16", "fp32"))
@pytest.mark.parametrize("case", COMMITS, ids=lambda case: case.name)
def test_commit_of_everything(case, data, full_gpu):
    commit_parity(case, data)


def commit_parity(case, data):
    """After a verify, and beside a recover: the two states have one budget."""
    with emulated() as emulator:
        checks.parity(case, "cpu", {"bf16": torch.bfloat16, "fp32": torch.float32}[data], torch.bfloat16)
    assert emulator.kernels.count("commit_async_kernel") == 2


@pytest.fixture
def whole_rows(monkeypatch):
    """The checks' window, with heads that the Gluon kernels take."""
    window = checks.window
    sizes = {"K": 64, "V": 64, "HV": 1}
    monkeypatch.setattr(checks, "window", lambda device, pool, **changed: window(device, pool, **{**sizes, **changed}))


COMMIT_CHECKS = [
    checks.in_place_equals_out_of_place,
    checks.rejected_tokens_change_no_bit,
    checks.plan_strides,
]


def test_without_gate_parameters(whole_rows, full_gpu):
    x = checks.window("cpu", torch.bfloat16, gate="bounded")
    x.A_log, x.dt_bias = None, None
    with emulated() as emulator:
        kernel_cases.check_states(x, check_verify(x), [6, 3, 1])
    assert {"verify_async_kernel", "commit_async_kernel"} <= set(emulator.kernels)


@pytest.mark.parametrize("check", COMMIT_CHECKS, ids=lambda check: check.__name__)
def test_behaviour_of_commit(check, whole_rows, full_gpu):
    with emulated() as emulator:
        check("cpu", torch.bfloat16)
    assert "commit_async_kernel" in emulator.kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("check", [check for check in checks.CHECKS if check is not checks.input_strides])
def test_behaviour(check, pool, whole_rows, full_gpu):
    with emulated() as emulator:
        check("cpu", pool)
    assert emulator.kernels or check is checks.empty


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_input_strides(pool, whole_rows, full_gpu, monkeypatch):
    """Of verify alone: the Triton kernel that recovers sums in the order that alignment allows, also with these heads."""
    window, recover = checks.window, lambda self, initial, u, length, **_: initial
    monkeypatch.setattr(kernel_cases.Inputs, "recover", recover)
    monkeypatch.setattr(checks, "window", lambda *x: window(*x, gate="bounded"))
    with emulated() as emulator:
        checks.input_strides("cpu", pool)
    assert emulator.kernels == ["verify_async_kernel"] * 4


@pytest.mark.parametrize(
    ("T", "K", "pool"), ((6, 64, torch.bfloat16), (16, 64, torch.bfloat16), (8, 192, torch.float32)), ids=str
)
def test_later_tokens_do_not_reach_earlier_ones(T, K, pool):
    """Rejected tokens that are not finite: 0 * NaN is NaN, wherever a matrix unit multiplies by a zero."""
    with emulated() as emulator:
        sizes = {"T": T, "K": K, "V": 64, "HV": 1, "batch": 1}
        checks.later_tokens_do_not_reach_earlier_ones("cpu", pool, 3, ("bounded",), **sizes)
    assert set(emulator.kernels) == {"verify_async_kernel"}


def layers_case(name: str, K: int, V: int, value_heads: int = 2, **settings) -> layers_checks.Case:
    sizes = {"heads": 1, "value_heads": value_heads, "key_dim": K, "value_dim": V}
    kind = {"sizes": sizes, "guard": 0, **settings.pop("kind", {})}
    return layers_checks.Case(name, kind=kind, **settings)


LAYERS = [
    next(case for case in layers_checks.CASES if case.name == "whole_rows"),
    layers_case("packed", 96, 96, kind={"lengths": [4, 0, 2], "tail": 3}),
    layers_case("precomputed", 64, 32, 1, pad_slot_id=0, kind={"gate": "precomputed"}),
]
MORE_LAYERS = [
    layers_case("one_layer", 64, 64, layers=1),
    layers_case("many_layers", 128, 64, 1, layers=11, batch=1),
    layers_case("smallest", 16, 32),
    layers_case("cut_off", 112, 160, pad_slot_id=0),
    layers_case("unbounded", 64, 64, kind={"gate": "unbounded"}),
    layers_case("no_norm", 64, 64, kind={"l2norm": False}),
]


def layers_parity(case, data, monkeypatch):
    address_table = launch_layers.address_table
    with emulated() as emulator:

        def noted(kinds, device):
            emulator.reachable = [x for tensors in kinds for x in tensors]
            return address_table(kinds, device)

        monkeypatch.setattr(launch_layers, "address_table", noted)
        layers_checks.parity(case, "cpu", data, torch.bfloat16)
    assert emulator.kernels.count("commit_layers_async_kernel") == 1
    assert emulator.kernels.count("commit_async_kernel") == case.layers


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_layers_have_the_bits_of_one_launch_each(case, monkeypatch, full_gpu):
    layers_parity(case, torch.bfloat16, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("case", MORE_LAYERS, ids=lambda case: case.name)
def test_more_layers_have_the_bits_of_one_launch_each(case, data, monkeypatch, full_gpu):
    layers_parity(case, data, monkeypatch)

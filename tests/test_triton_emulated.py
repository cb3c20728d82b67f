"""Triton's own kernels as compiled, with every access checked: bounds, and what several warps store in one place.

Small matrices repeat in a layout of many threads, and every warp that holds a copy stores it: the bits must be the same.
"""

import itertools
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import kernel_checks as checks
import triton
from kernel_cases import CASES, Case, build, by_name, check_verify
from programs import LIMITS, launch_as
from ptx_emulator.launches import emulated
from test_gluon_emulated import budget_of_a_gpu, is_gluon  # noqa: F401 - a fixture
from test_triton_cuda import ANY_GATE, DTYPES, LARGE

# From 3.8 on Triton takes Hopper's asynchronous products, which the emulator does not know.
ARCH = 90 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 80
BY_NAME = by_name(*(case for case in (*CASES, *LARGE, *ANY_GATE) if not is_gluon(case)))
# Every way to the couplings, with one warp and with up to eight.
COVERING = [
    ("padding_null_block", "fp32", "fewest"),
    ("padding_null_block", "bf16_data_fp32_pool", "fewest"),
    ("odd_40_24", "fp16", "fewest"),
    ("odd_24_40", "fp32", "fewest"),
    ("odd_200_96", "bf16", "many"),
    ("strided", "bf16", "fewest"),
    ("strided_odd", "fp32_data_bf16_pool", "many"),
    ("size_256_window_16", "bf16", "many"),
    ("strong_16", "fp32", "fewest"),
    ("size_1", "fp32", "fewest"),
]
REST = [case for case in itertools.product(BY_NAME, DTYPES, LIMITS) if case not in COVERING]


@pytest.mark.parametrize("programs", ("few", "many"))
@pytest.mark.parametrize("columns", (1, 3), ids=("recover", "columns"))
@pytest.mark.parametrize("V", (96, 288))
def test_values_that_are_no_power_of_two(V, columns, programs, monkeypatch):
    """Tiles of 16 rows divide 96 and 288, but the next power of two is larger."""
    launch_as(programs, monkeypatch)
    x = build(Case("values", 4, K=32, V=V, batch=1), "cpu", torch.bfloat16, torch.bfloat16)
    # The last slot, with nothing behind it; and no copies of 16 bytes, or the Gluon kernel would take it.
    storage = torch.randn(x.state.numel() + 1).bfloat16()
    x.state, x.slots = storage[1:].view(x.state.shape), torch.tensor([len(x.state) - 1])
    u, length = torch.randn(x.v.shape), torch.full((1, columns), 3)
    with emulated() as emulator:
        if columns > 1:
            x.commit(u, x.slots, x.slots[:, None].repeat(1, columns), length)
        else:
            x.recover(x.state[x.slots.long()], u, length[:, 0])
    assert emulator.kernels == ["commit_kernel"]


@pytest.mark.parametrize("programs", ("few", "many"))
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_columns_have_the_bits_of_their_own_commits(pool, programs, monkeypatch):
    launch_as(programs, monkeypatch)
    with emulated(ARCH) as emulator:
        checks.columns_have_the_bits_of_their_own_commits("cpu", pool)
    assert emulator.kernels == ["verify_kernel"] + ["commit_kernel"] * 4


def verify(name, dtypes, programs, monkeypatch):
    launch_as(programs, monkeypatch)
    with emulated(ARCH) as emulator:
        check_verify(build(BY_NAME[name], "cpu", *DTYPES[dtypes]))
    assert emulator.kernels == ["verify_kernel"]


@pytest.mark.parametrize(("name", "dtypes", "programs"), COVERING)
def test_verify(name, dtypes, programs, monkeypatch):
    verify(name, dtypes, programs, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtypes", "programs"), REST)
def test_verify_of_everything(name, dtypes, programs, monkeypatch):
    verify(name, dtypes, programs, monkeypatch)

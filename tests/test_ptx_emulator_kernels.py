"""Compiled Triton and Gluon kernels in the emulator: right ones are right, and broken ones are caught."""

import itertools
import os
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import kernel_cases
import triton
import triton.language as tl
from programs import launch_as
from ptx_emulator import PTXError
from ptx_emulator.launches import emulated


@triton.jit
def dot_kernel(
    a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * B_ROW + n[None, :] * B_COLUMN)
    z = tl.load(c + m[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, z, input_precision="tf32"))


@pytest.mark.parametrize("columns_first", (False, True), ids=("rows", "columns"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_products_of_matrices(dtype, columns_first):
    """The compiler's layouts and the emulator's fragments are of the same manual. Integers, so that nothing is rounded."""
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-8, 8, shape, generator=rng).float() for shape in ((32, 32), (32, 16), (32, 16)))
    out = torch.zeros_like(c)
    x, y = a.to(dtype), b.to(dtype)
    y = y.t().contiguous().t() if columns_first else y
    with emulated(80) as emulator:
        dot_kernel[(1,)](x, y, c, out, 32, 16, 32, *y.stride(), num_warps=2)
    kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "tf32"}[dtype]
    assert f".row.col.f32.{kind}.{kind}.f32" in emulator.compiled[0].ptx
    assert torch.equal(out, a @ b + c)


def test_tf32_has_ten_bits():
    x = torch.zeros(32, 32)
    x[0, 0] = 1 + 2.0**-10 + 2.0**-11
    y, c, out = torch.eye(32)[:, :16].contiguous(), torch.zeros(32, 16), torch.zeros(32, 16)
    with emulated(80):
        dot_kernel[(1,)](x, y, c, out, 32, 16, 32, *y.stride(), num_warps=2)
    assert out[0, 0] == 1 + 2.0**-10


@triton.jit
def normalise_kernel(x, out, scale, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * N + at, mask=at < N, other=float("-inf")) * scale
    exponentials = tl.exp2(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * N + at, tl.cumsum(exponentials / tl.sum(exponentials, 0), 0), mask=at < N)


def test_a_kernel_of_several_warps_programs_and_masks():
    """Reductions and a scan across warps: exchanges, shared memory, barriers, what only some threads do."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, float("nan"))
    with emulated() as emulator:
        normalise_kernel[(3,)](x, out, 2.5, 200, 256, num_warps=4)
        normalise_kernel[(3,)](x, out, 2.5, 200, 256, num_warps=4)
    assert emulator.kernels == ["normalise_kernel"] * 2 and emulator.compiled[0] is emulator.compiled[1]
    expected = (x.double() * 2.5 * np.log(2)).softmax(1).cumsum(1)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_a_dropped_mask_is_outside():
    x = torch.randn(3, 200)
    with (
        emulated(change=lambda ptx: re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx)),
        pytest.raises(PTXError, match="outside"),
    ):
        normalise_kernel[(3,)](x, torch.empty_like(x), 2.5, 200, 256, num_warps=4)


PACKED = next(case for case in kernel_cases.CASES if case.name == "bounded_64_packed")


WAIT, BARRIER = r"(cp\.async\.wait_group\s+)(\d+)", r"bar\.sync\s+0;"


OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def weaker(wait: re.Match) -> str:
    """Lets one copy more be on its way."""
    return f"{wait[1]}{int(wait[2]) + 1}"


def weaker_waits(ptx: str) -> str:
    return re.sub(WAIT, weaker, ptx)


def no_barriers(ptx: str) -> str:
    return re.sub(BARRIER, "", ptx)


def unmasked_stores(ptx: str) -> str:
    return re.sub(r"@%p\d+ (st\.global)", r"\1", ptx)


def unmasked_loads(ptx: str) -> str:
    return re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx)


def same(ptx: str) -> str:
    return f"{ptx}\n"


BROKEN = {
    weaker_waits: r"waited for(?s:.*)by cp\.async(?s:.*)verify_async\.py",
    unmasked_stores: r"outside of every tensor(?s:.*)st\.global(?s:.*)verify_async\.py",
    unmasked_loads: r"outside of every tensor(?s:.*)ld\.global(?s:.*)verify_async\.py",
}


def changed_once(pattern: str, change, number: int):
    """Changes the match with that number, and no other."""
    numbers = itertools.count()
    return lambda ptx: re.sub(pattern, lambda match: change(match) if next(numbers) == number else match[0], ptx)


@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    (
        (WAIT, weaker, r"waited for(?s:.*)by cp\.async(?s:.*)tiles\.py"),
        pytest.param(
            *(BARRIER, lambda _: "", r"a race(?s:.*)by (st|ld|cp)(?s:.*)in (st|ld|cp)"),
            marks=pytest.mark.skipif(
                OLD_TRITON, reason="Triton 3.6 places barriers between stores to different places"
            ),
        ),
    ),
    ids=("wait", "barrier"),
)
def test_every_wait_and_every_barrier_of_verify_is_needed(pattern, change, message, monkeypatch):
    """Any one that is missing is noticed."""
    launch_as("many", monkeypatch)
    inputs = kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16)
    with emulated() as emulator:
        inputs.verify()
        count = len(re.findall(pattern, emulator.compiled[0].ptx))
        for number in range(count):
            emulator.change = changed_once(pattern, change, number)
            with pytest.raises(PTXError, match=message):
                inputs.verify()
    assert count > 1


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_broken_verify_is_caught(change, monkeypatch):
    launch_as("many", monkeypatch)
    monkeypatch.setattr(kernel_cases, "verify_slack", lambda state: 2.0**-15)
    with emulated(change=change), pytest.raises(PTXError, match=BROKEN[change]):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))
    with emulated(change=same):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    ((no_barriers, "a race"), (unmasked_loads, "outside of every tensor")),
    ids=("no_barriers", "unmasked_loads"),
)
def test_a_broken_commit_is_caught(change, message, monkeypatch):
    launch_as("many", monkeypatch)
    x = kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16)
    arguments = (torch.randn(x.v.shape), x.slots, x.slots[:, None], torch.full((4, 1), 3))
    with emulated(change=change) as emulator:
        with pytest.raises(PTXError, match=message):
            x.commit(*arguments)
        assert emulator.kernels == ["commit_rows_kernel"]
        emulator.change = None
        x.commit(*arguments)


def test_a_wrong_number_is_not_within_the_budget(monkeypatch):
    """The kernel's last product of matrices left out."""
    launch_as("many", monkeypatch)
    monkeypatch.setattr(kernel_cases, "verify_slack", lambda state: 2.0**-15)

    def without_the_last_product(ptx: str) -> str:
        last = ptx.rindex("mma.sync")
        end = ptx.index(";", last)
        result, _, _, c = re.findall(r"\{[^}]*\}", ptx[last:end])
        moves = (
            f"mov.b32 {x}, {y}" for x, y in zip(re.findall(r"%r\d+", result), re.findall(r"%r\d+", c), strict=True)
        )
        return ptx[:last] + "; ".join(moves) + ptx[end:]

    with emulated(change=without_the_last_product), pytest.raises(AssertionError, match="exceeds"):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))

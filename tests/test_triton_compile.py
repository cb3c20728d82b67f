"""What the compiled kernels must not hold; registers, shared memory and spills are pinned in test_compile_table.py."""

import os
import re

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton_compile

from benchmarks import compilation, kernel_variants


def test_float64_would_be_seen():
    """The check of test_compile_table.py can fail: a kernel that multiplies by a double shows it."""
    import triton
    import triton.language as tl

    @triton.jit
    def scaled(x, factor):
        tl.store(x, tl.load(x) * factor)

    compiled = triton_compile.compile_kernel(scaled, {"x": "*fp32", "factor": "fp64"}, 90)
    assert ".f64" in compiled.ptx


def test_spills_would_be_seen():
    """A tile of 65536 elements does not fit one warp's registers."""
    import triton
    import triton.language as tl

    @triton.jit
    def sorted_tile(x):
        at = tl.arange(0, 8192)
        values = tl.load(x + at)
        for _ in range(4):
            values = values + tl.sum(values, 0) * values
        tl.store(x + at, values)

    compiled = compilation.compile_source(
        triton_compile.ASTSource(sorted_tile, {"x": "*fp32"}, {}, {}),
        triton_compile.GPUTarget("cuda", 90, 32),
        {"num_warps": 1},
    )
    assert compiled.registers == 255 and compiled.spilled_bytes > 0


def test_a_launch_is_noted_as_the_launcher_makes_it():
    launch = compilation.only_launch(kernel_variants.verify("fp32", T=5, K=24, V=40))
    assert launch.grid[0] % (kernel_variants.BATCH * kernel_variants.HEADS) == 0
    assert launch.kernel.__name__ == "verify_kernel" and {"num_warps"} <= {*launch.keywords}


def test_more_than_one_launch_is_refused():
    verify = kernel_variants.verify("fp32", T=2, K=16, V=16)
    with pytest.raises(ValueError, match="verify_kernel"):
        compilation.only_launch(lambda: (verify(), verify()))


def test_settings_reach_the_compiled_kernel():
    """Alignment, dtypes and the launcher's configuration: each of them changes the code."""
    plain = triton_compile.compile_commit(90, "fp32", K=32, V=32)
    other = {
        "dtype": triton_compile.compile_commit(90, "bf16", K=32, V=32),
        "columns": triton_compile.compile_commit(90, "fp32", K=32, V=32, columns=2),
        "gate": triton_compile.compile_commit(90, "fp32", K=32, V=32, bounded=False),
    }
    assert all(compiled.ptx != plain.ptx for compiled in other.values())
    assert plain.ptx.count("ld.global.v4") > 0


@pytest.mark.parametrize("batch", (kernel_variants.BATCH, kernel_variants.FEW_ROWS))
@pytest.mark.parametrize(("T", "count"), ((8, 4 * 8), (16, 4 * 8 + 2 * 3 * 8 + 6 * 8)))
def test_element_t_i_of_the_couplings_is_in_lane_4_t_plus_i_over_2(batch, T, count):
    """``elimination.substitute`` exchanges by lane number what the compiler laid out; every warp holds a copy."""
    launch = compilation.only_launch(kernel_variants.verify("bf16", T=T, K=64, V=128, batch=batch))
    ttgir = compilation.compile_launch(launch, 90).ttgir
    operand = r"tensor<8x4xf32, #ttg.slice<\{dim = 2, parent = (#\w+)\}>>"
    exchanges = [line for line in ttgir.splitlines() if '"shfl.sync.idx' in line]
    (layout,) = {layout for line in exchanges for layout in re.findall(operand, line)}
    (definition,) = (line for line in ttgir.splitlines() if line.startswith(f"{layout} ="))
    assert len(exchanges) == count
    lanes, warps = (re.search(rf"{name} = (\[\[.*?\]\])", definition).group(1) for name in ("lane", "warp"))
    assert lanes == "[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]"
    assert set(re.findall(r"\d", warps)) == {"0"}


@pytest.mark.parametrize("batch", (kernel_variants.BATCH, kernel_variants.FEW_ROWS))
@pytest.mark.parametrize("K", (64, 128))
def test_threads_that_exchange_their_terms_agree_on_the_sum(K, batch):
    """A product fused with what another thread sent is rounded in one of the two threads, and not in the other."""
    ptx = triton_compile.compile_commit(90, "fp32", K=K, V=64, data="fp32", batch=batch).ptx
    sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", ptx))
    addends = set(re.findall(r"fma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, (%r\d+);", ptx))
    assert sent and not sent & addends

"""The all-layers commit, compiled: the single layer's arithmetic and vectors; figures are pinned in test_compile_table.py."""

import os
import re

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton_compile

from benchmarks import kernel_variants

COMMIT = triton_compile.compiler(kernel_variants.commit_layers)
VECTOR = re.compile(r"(?:ld|st)\.global[.\w:]*\.v[24]")


def test_scalar_gate_compiles():
    compiled = COMMIT(90, pool="fp16", data="fp16", scalar_gate=True)
    assert ".f64" not in compiled.ptx and compiled.spilled_bytes == 0


def arithmetic(ptx: str) -> list[str]:
    """The floating-point instructions in order, without their operands."""
    return re.findall(r"\b(?:fma|mul|add|sub|div|ex2|rsqrt|lg2)\.[.\w]*f32\b", ptx)


@pytest.mark.parametrize("settings", [{"pool": "bf16"}, {"pool": "fp32", "columns": 2}], ids=["bf16", "fp32_columns"])
def test_arithmetic_and_vectors_are_the_single_layer_kernel_s(settings):
    """An address loaded from the table is used like a pointer argument: same widths, same rounding steps."""
    one, all_layers = (compiler(90, **settings).ptx for compiler in (triton_compile.compile_commit, COMMIT))
    assert len(VECTOR.findall(one)) == len(VECTOR.findall(all_layers)) > 0
    assert arithmetic(one) == arithmetic(all_layers) != []


def test_without_alignment_nothing_is_assumed():
    assert not VECTOR.findall(COMMIT(90, pool="bf16", aligned=False).ptx)

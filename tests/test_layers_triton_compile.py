"""The all-layers kernels compiled for GPUs this machine does not have: no spills, no float64, whole vectors loaded."""

import os
import re

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import conv_compile
import layers_compile
import triton_compile

COMMIT, CONV = layers_compile.compile_commit, layers_compile.compile_conv_commit
VARIANTS = {
    "commit_bf16": (COMMIT, {"pool": "bf16"}),
    "commit_fp32": (COMMIT, {"pool": "fp32"}),
    "commit_columns_unbounded": (COMMIT, {"pool": "bf16", "columns": 3, "bounded": False, "packed": True}),
    "conv_bf16": (CONV, {"data": "bf16"}),
    "conv_fp32_to_bf16": (CONV, {"data": "fp32", "state": "bf16"}),
    "conv_columns": (CONV, {"data": "bf16", "columns": 3, "packed": True}),
}
ARCHITECTURES = (80, 90, 100, 120)
VECTOR = re.compile(r"(?:ld|st)\.global[.\w:]*\.v[24]")


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("name", VARIANTS)
def test_no_variant_spills(name, arch, record_property):
    compiler, settings = VARIANTS[name]
    compiled = compiler(arch, **settings)
    for key in ("registers", "spilled_bytes", "shared_bytes", "num_warps"):
        record_property(f"{name}_{key}", getattr(compiled, key))
    assert ".f64" not in compiled.ptx, "a float64 instruction: a Python float reached the kernel as a double"
    assert compiled.spilled_bytes == 0, f"{compiled.spilled_bytes} bytes of spills at {compiled.registers} registers"


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
    assert not VECTOR.findall(COMMIT(90, pool="bf16", aligned=0).ptx)


def test_commit_reads_the_history_before_it_writes():
    """A barrier stands between the history's loads and the first store: the source may be a destination."""
    for compiled in (CONV(90, data="bf16", columns=3), conv_compile.compile_commit(90, data="bf16", columns=3)):
        before = compiled.ptx[: compiled.ptx.index("bar.sync")]
        assert before.count("ld.global") >= 3 and "st.global" not in before

"""The kernels compiled for GPUs this machine does not have: no spills, no float64, shared memory that fits."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton_compile

VERIFY, COMMIT = triton_compile.compile_verify, triton_compile.compile_commit
# Blocks of the smallest supported GPUs of each generation (8.6, 12.0) can have 99 KiB.
SHARED_LIMIT = 99 * 1024
# The sizes of the models this is for: they must not spill.
MAIN = {
    "verify_bf16": (VERIFY, {"pool": "bf16"}),
    "verify_fp32": (VERIFY, {"pool": "fp32"}),
    "verify_unbounded_bf16": (VERIFY, {"pool": "bf16", "factored": False}),
    "commit_bf16": (COMMIT, {"pool": "bf16"}),
    "commit_fp32": (COMMIT, {"pool": "fp32"}),
}
OTHERS = {
    "verify_window_1": (VERIFY, {"pool": "bf16", "T": 1}),
    "verify_window_16": (VERIFY, {"pool": "bf16", "T": 16}),
    "verify_scalar_packed": (
        VERIFY,
        {"pool": "fp16", "T": 4, "data": "fp16", "factored": False, "scalar_gate": True, "packed": True, "groups": 2},
    ),
    "verify_96": (VERIFY, {"pool": "fp32", "T": 3, "K": 96, "V": 40, "data": "fp32"}),
    "verify_256": (VERIFY, {"pool": "bf16", "T": 4, "K": 256, "V": 256}),
    "verify_256_window_16": (VERIFY, {"pool": "fp32", "T": 16, "K": 256, "V": 256, "factored": False}),
    "commit_256": (COMMIT, {"pool": "fp32", "K": 256, "V": 256}),
    "commit_columns_unbounded": (COMMIT, {"pool": "bf16", "columns": 3, "bounded": False, "packed": True}),
    "commit_scalar": (COMMIT, {"pool": "fp16", "scalar_gate": True, "data": "fp16"}),
    "recover": (COMMIT, {"pool": "bf16", "in_place": False}),
}
ARCHITECTURES = (80, 90, 100, 120)


def check(compiled, record_property, name):
    for key in ("registers", "spilled_bytes", "shared_bytes", "num_warps"):
        record_property(f"{name}_{key}", getattr(compiled, key))
    assert ".f64" not in compiled.ptx, "a float64 instruction: a Python float reached the kernel as a double"
    assert compiled.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("name", MAIN)
def test_main_variants_do_not_spill(name, arch, record_property):
    compiler, settings = MAIN[name]
    compiled = compiler(arch, **settings)
    check(compiled, record_property, name)
    assert compiled.spilled_bytes == 0, f"{compiled.spilled_bytes} bytes of spills at {compiled.registers} registers"


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_compile(name, record_property):
    compiler, settings = OTHERS[name]
    check(compiler(90, **settings), record_property, name)


def test_float64_would_be_seen():
    """The check above can fail: a kernel that multiplies by a double shows it."""
    import triton
    import triton.language as tl

    @triton.jit
    def scaled(x, factor):
        tl.store(x, tl.load(x) * factor)

    compiled = triton_compile.compile_kernel(scaled, {"x": "*fp32", "factor": "fp64"}, {}, 90)
    assert ".f64" in compiled.ptx

"""The convolution's kernels compiled for GPUs this machine does not have: no spills, no float64, no shared memory."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import conv_compile

VERIFY, COMMIT = conv_compile.compile_verify, conv_compile.compile_commit
VARIANTS = {
    "verify_bf16": (VERIFY, {"data": "bf16"}),
    "verify_fp32": (VERIFY, {"data": "fp32", "bias": True}),
    "verify_fp16_fp32_state": (VERIFY, {"data": "fp16", "state": "fp32", "weight": "fp32", "silu": False}),
    "verify_packed": (VERIFY, {"data": "bf16", "packed": True, "pool": "strided"}),
    "verify_window_1": (VERIFY, {"data": "bf16", "T": 1}),
    "verify_widest": (VERIFY, {"data": "fp32", "T": 16, "W": 8, "bias": True, "packed": True, "pool": "strided"}),
    "verify_narrowest": (VERIFY, {"data": "bf16", "W": 2, "D": 48}),
    "commit_bf16": (COMMIT, {"data": "bf16"}),
    "commit_fp32": (COMMIT, {"data": "fp32", "pool": "channels innermost"}),
    "commit_fp32_to_bf16": (COMMIT, {"data": "fp32", "state": "bf16"}),
    "commit_columns": (COMMIT, {"data": "bf16", "columns": 3, "packed": True, "pool": "strided"}),
    "commit_widest": (COMMIT, {"data": "fp32", "T": 16, "W": 8, "columns": 17, "packed": True, "pool": "strided"}),
    "commit_narrowest": (COMMIT, {"data": "fp16", "W": 2, "D": 48}),
}
ARCHITECTURES = (80, 90, 100, 120)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_fits_its_registers(name, arch, record_property):
    compiler, settings = VARIANTS[name]
    compiled = compiler(arch, **settings)
    for key in ("registers", "spilled_bytes", "shared_bytes", "num_warps"):
        record_property(f"{name}_{key}", getattr(compiled, key))
    assert ".f64" not in compiled.ptx, "a float64 instruction: a Python float reached the kernel as a double"
    assert compiled.spilled_bytes == 0, f"{compiled.spilled_bytes} bytes of spills at {compiled.registers} registers"
    assert compiled.shared_bytes <= 4096, "a shift of values between threads of a row-wise kernel"


@pytest.mark.parametrize("name", ["verify_bf16", "verify_widest"])
def test_verify_waits_for_memory_once(name):
    """All of the window's loads come before the first output is stored: T windows would be T round trips."""
    compiler, settings = VARIANTS[name]
    ptx = compiler(90, **settings).ptx
    body = ptx[ptx.rindex("ld.global") :]
    assert body.count("st.global") >= settings.get("T", 8)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("commit") and "narrowest" not in name])
def test_commit_reads_the_history_before_it_writes(name):
    """A barrier stands between the history's loads and the first store: the source may be a destination."""
    compiler, settings = VARIANTS[name]
    ptx = compiler(90, **settings).ptx
    before = ptx[: ptx.index("bar.sync")]
    assert before.count("ld.global") >= settings.get("W", 4) - 1
    assert "st.global" not in before

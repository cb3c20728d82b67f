"""The order of loads and stores in the convolution's compiled kernels; their figures are pinned in test_compile_table.py."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from benchmarks.compile_table import compile_variant
from benchmarks.kernel_variants import VARIANTS

COMMITS = [name for name in VARIANTS if name.startswith("conv_commit") and "narrowest" not in name]


@pytest.mark.parametrize("name", ["conv_verify_bf16", "conv_verify_widest"])
def test_verify_waits_for_memory_once(name):
    """All of the window's loads come before the first output is stored: T windows would be T round trips."""
    ptx = compile_variant(name, 90).ptx
    body = ptx[ptx.rindex("ld.global") :]
    assert body.count("st.global") >= VARIANTS[name][1].get("T", 8)


@pytest.mark.parametrize("name", COMMITS)
def test_commit_reads_the_history_before_it_writes(name):
    """A barrier stands between the history's loads and the first store: the source may be a destination."""
    ptx = compile_variant(name, 90).ptx
    before = ptx[: ptx.index("bar.sync")]
    assert before.count("ld.global") >= VARIANTS[name][1].get("W", 4) - 1
    assert "st.global" not in before

"""Loading the peers' kernel files, with small files that look like theirs."""

import sys

import pytest

pytest.importorskip("triton")

from benchmarks import peers

VLLM = """
from dataclasses import dataclass

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID


@triton.jit
def kernel(x, N: tl.constexpr):
    tl.store(x, N)


@dataclass
class Records:
    other: "Records | None" = None
"""
NATIVE = """
from vllm.platforms import current_platform
from vllm.third_party.flash_linear_attention.ops.op import exp, log
from vllm.utils.math_utils import cdiv, next_power_of_2
supported = current_platform.is_arch_support_pdl()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vllm_recoverssm.py").write_text(VLLM)
    (tmp_path / "vllm_fused_recurrent.py").write_text(NATIVE)
    for package in ("kda_kernels", "gdn_kernels"):
        (tmp_path / "flashinfer_kda" / package).mkdir(parents=True)
    kernels = tmp_path / "flashinfer_kda"
    (kernels / "gdn_kernels" / "dtype_compat.py").write_text("bound = 80\n")
    (kernels / "kda_kernels" / "kda_decode_wy_output_only.py").write_text(
        "from ..gdn_kernels.dtype_compat import bound\ndef kda_recoverssm_verify(): return bound\n"
    )
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("recoverssm_peer")]:
        del sys.modules[name]


def test_files_load_without_vllm(folder):
    before = {name for name in sys.modules if name.startswith("vllm")}
    loaded = peers.load(folder)
    assert loaded.absent == {}
    assert loaded.vllm.NULL_BLOCK_ID == 0 and loaded.vllm.Records().other is None and loaded.native.supported is False
    assert loaded.flashinfer() == 80
    assert {name for name in sys.modules if name.startswith("vllm")} == before


def test_what_is_missing_is_named_with_the_remedy(folder):
    (folder / "vllm_recoverssm.py").unlink()
    kernel = folder / "flashinfer_kda" / "kda_kernels" / "kda_decode_wy_output_only.py"
    kernel.write_text("import no_such_compiler\n")
    loaded = peers.load(folder)
    assert {*loaded.absent} == {"vllm", "flashinfer"} and loaded.native is not None
    assert f"python -m benchmarks.peers {folder}" in loaded.absent["vllm"]
    assert "no_such_compiler" in loaded.absent["flashinfer"] and "nvidia-cutlass-dsl" in loaded.absent["flashinfer"]

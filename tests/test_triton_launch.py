"""Which kernel a launcher takes, without a GPU: the Gluon kernels where they are suited, the Triton kernels for all else."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("under the interpreter nothing is launched", allow_module_level=True)

from benchmarks import kernel_variants as variants
from benchmarks.compilation import only_launch
from recoverssm_ops.triton import launch


def kernel(call) -> str:
    return only_launch(call).kernel.__name__


@pytest.mark.parametrize("pool", ("bf16", "fp16", "fp32"))
@pytest.mark.parametrize(
    "setting",
    (
        {},
        {"T": 1},
        {"packed": True},
        {"K": 64, "V": 32},
        {"K": 112, "V": 160},
        {"data": "fp32"},
        {"groups": 4},
        {"batch": 2},
        {"K": 192, "V": 192},
        {"K": 256, "V": 256, "batch": 2},
        {"T": 9},
        {"T": 16, "packed": True, "K": 64, "V": 64},
        {"T": 16, "K": 256, "V": 256},
        {"scalar_gate": True, "groups": 4},
        {"bounded": False},
        {"bounded": False, "K": 256, "V": 256},
        {"bounded": False, "T": 16},
        {"scalar_gate": True, "bounded": False, "T": 16},
    ),
    ids=str,
)
def test_verify_takes_the_gluon_kernel(pool, setting):
    assert kernel(variants.verify(pool, **setting)) == "verify_async_kernel"


UNSUITED = {
    "wide head": {"K": 272},
    "long rows of values": {"K": 192, "V": 288},
    "values in no tiles of 64 beside the largest operands": {"T": 16, "K": 256, "V": 96},
    "odd key dimension": {"K": 40},
    "odd value dimension": {"V": 40},
    "pool not aligned to 16 bytes": {"aligned": False},
    "long window of unbounded gates of large heads": {"bounded": False, "T": 9, "K": 192},
}


@pytest.mark.parametrize("setting", UNSUITED.values(), ids=UNSUITED)
def test_verify_takes_the_triton_kernel(setting):
    assert kernel(variants.verify("bf16", **setting)) == "verify_kernel"


def test_rows_of_the_pool_that_are_not_contiguous_take_the_triton_kernel():
    state = torch.empty(3, 8, 32, 64)[..., :32]
    assert not launch._fits_gluon(8, (torch.empty(1, 8, 8, 32),), state)
    assert launch._fits_gluon(8, (torch.empty(1, 8, 8, 32),), state.contiguous())


@pytest.mark.parametrize("pool", ("bf16", "fp16", "fp32"))
@pytest.mark.parametrize(
    "setting",
    (
        {},
        {"T": 1},
        {"T": 16, "packed": True},
        {"bounded": False},
        {"scalar_gate": True},
        {"data": "fp32"},
        {"K": 96, "V": 96},
        {"K": 256, "V": 256},
        {"V": 288},
        {"columns": 2},
    ),
    ids=str,
)
def test_commit_takes_the_gluon_kernel(pool, setting):
    """And so does the commit of all layers, whose bits are those of one launch a layer."""
    assert kernel(variants.commit(pool, **setting)) == "commit_rows_kernel"
    for batch in (variants.WAVE_ROWS // 2, variants.FEW_ROWS):
        assert kernel(variants.commit(pool, batch=batch, **setting)) == "commit_rows_kernel"
    assert kernel(variants.commit_layers(pool, layers=2, **setting)) == "commit_layers_rows_kernel"


@pytest.mark.parametrize("setting", ({"T": 17}, {"K": 272}, {"K": 40}, {"V": 40}, {"aligned": False}), ids=str)
def test_commit_takes_the_triton_kernel(setting):
    assert kernel(variants.commit("bf16", **setting)) == "commit_kernel"
    assert kernel(variants.commit_layers("bf16", layers=2, **setting)) == "commit_layers_kernel"

"""StateSpec reproduces figures that others have published for Kimi-K3: 69 linear attention layers, 96 heads of 128, W 4.

The sources are the public pull requests vllm-project/vllm#51855 and ROCm/ATOM#1883.
"""

import pytest
import torch

from recoverssm_ops import LayerShape, StateSpec

MIB, GIB, GB = 2**20, 2**30, 10**9
KIMI_K3 = LayerShape(num_heads=96, head_k_dim=128)
DRAFTS = 7


def kimi_k3(**parallel: int) -> StateSpec:
    return StateSpec(layer=KIMI_K3, num_layers=69, window=1 + DRAFTS, **parallel)


def test_slot_and_request_of_twelve_heads():
    """57.8 MiB a slot, 51.75 recurrent and 6.06 conv, and 462 MiB a request."""
    plain = kimi_k3(tensor_parallel=8).plain()
    slots = plain.slots_per_request
    assert slots == 8
    assert plain.bytes_of("recurrent") / slots == 51.75 * MIB
    assert round(plain.bytes_of("conv") / slots / MIB, 2) == 6.06
    assert round(plain.slot_bytes / MIB, 2) == 57.81
    assert int(plain.state_bytes / MIB) == 462


def test_the_conv_layout_behind_the_published_slot():
    """Of the layouts one could think of, only W-1+drafts bfloat16 columns of q, k and v give 6.06 MiB."""
    conv = {part.name: part for part in kimi_k3(tensor_parallel=8).plain().state}["conv"]
    assert conv.shape == (3 * 12 * 128, 3 + DRAFTS)
    assert conv.dtype == torch.bfloat16


def test_pool_of_64_requests():
    """28.91 GiB a rank for 64 requests of 8 slots."""
    assert round(64 * kimi_k3(tensor_parallel=8).plain().state_bytes / GIB, 2) == 28.91


def test_wasted_bytes_with_data_parallel_attention():
    """About 12 GB wasted for some 400 MB of recurrent state, with 4 sequences a rank and 7 drafts."""
    spec = kimi_k3(data_parallel=8)
    plain, recoverssm = spec.plain(), spec.recoverssm()
    assert spec.requests_per_rank(32) == 4
    assert recoverssm.bytes_of("recurrent") / MIB == 414
    wasted = 4 * (plain.bytes_of("recurrent") - recoverssm.bytes_of("recurrent"))
    assert wasted / GB == pytest.approx(12, abs=0.2)


def test_recoverssm_at_rest_and_in_a_step():
    """One slot with 3 conv columns (1.8 MiB): 53.6 MiB at rest. The published records: 6.47 MiB for 8 tokens."""
    layout = kimi_k3(tensor_parallel=8).recoverssm()
    assert layout.slots_per_request == 1
    assert layout.bytes_of("recurrent") == 51.75 * MIB
    assert round(layout.bytes_of("conv") / MIB, 1) == 1.8
    assert round(layout.state_bytes / MIB, 1) == 53.6
    assert round(layout.bytes_of("u", "k", "g") / MIB, 2) == 6.47
    # Not in the published figure: the convolution's inputs, which stand in for 7 conv columns in each slot.
    assert layout.transient_bytes == layout.bytes_of("u", "k", "g") + layout.bytes_of("conv_inputs")
    assert layout.bytes_of("conv_inputs") == 69 * 8 * 3 * 12 * 128 * 2

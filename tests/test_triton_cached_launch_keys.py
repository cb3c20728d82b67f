"""Launches that count as the same: Triton specialises them alike, by its own binder."""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from test_triton_cached_launch import TARGET, make_verify
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from recoverssm_ops.triton import cached_launch, launch, launch_conv


def specialization(described):
    """What Triton tells compiled kernels apart by, and what it passes beside addresses."""
    kernel, grid, tensors, numbers, options = described
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    _, found, rest = bind(*tensors, *numbers, **options)
    return kernel.__name__, grid, numbers, str(found), str(rest)


@st.composite
def tensors(draw, shape):
    """Dense, sliced, transposed or broadcast, at any offset."""
    gaps = draw(st.tuples(*(st.sampled_from((0, 0, 1, 16)) for _ in shape)))
    offset = draw(st.sampled_from((0, 0, 1, 2, 4, 8)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    padded = [size + gap for size, gap in zip(shape, gaps, strict=True)]
    storage = torch.zeros(torch.Size(padded).numel() + offset, dtype=dtype)[offset:]
    x = storage.view(padded)[tuple(slice(size) for size in shape)]
    return draw(st.sampled_from((x, x.contiguous(), x[:1].expand(shape))))


@st.composite
def launches(draw):
    """``describe``, tensors and settings of one launch of an operator."""
    batch, window, channels = draw(st.sampled_from(((1, 1, 16), (1, 4, 16), (2, 4, 16), (2, 4, 48))))
    given = []

    def note(*described):
        given.append(described)

    counts = torch.zeros(batch, draw(st.integers(1, 2)), dtype=draw(st.sampled_from((torch.int32, torch.int64))))
    x, state = draw(tensors((batch, window, channels))), draw(tensors((2, channels, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_conv, "relaunch", note)
        patch.setattr(launch, "relaunch", note)
        if draw(st.booleans()):
            launch_conv.commit(state, x, counts[:, 0], counts, counts, None, draw(st.sampled_from((-1, 0))))
        else:
            q, k, v, g = (draw(tensors((batch, window, 1, 16))) for _ in range(4))
            state, bias = draw(tensors((2, 1, 16, 16))), draw(st.sampled_from((None, torch.zeros(1, 16))))
            changed = {
                "beta": draw(tensors((batch, window, 1))),
                "state_indices": draw(st.sampled_from((None, counts[:, 0]))),
            }
            changed |= {"lower_bound": draw(st.sampled_from((0.0, -5.0))), "dt_bias": bias}
            launch.verify(**make_verify(q=q, k=k, v=v, g=g, state=state, max_seqlen=window, **changed))
    return given[0]


seen = {}


@given(launches())
def test_launches_of_one_key_have_one_specialization(drawn):
    """Against Triton's own binder, over all layouts drawn so far."""
    describe, tensors, settings, choices = drawn
    key = (describe, settings, choices, cached_launch.addresses_and_layout(tensors)[1])
    found = specialization(describe(*tensors, *settings))
    assert seen.setdefault(key, found) == found

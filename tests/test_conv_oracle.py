"""The convolution's oracle itself, against forms that share nothing with it."""

import pytest
import torch
import torch.nn.functional as F
from budget import relative_error

from recoverssm_ops.reference import causal_conv1d

EXACT = 1e-12  # two float64 evaluations of a handful of products


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", range(2, 9))
def test_oracle_is_pytorchs_convolution(width, with_bias, activation):
    generator = torch.Generator().manual_seed(width)
    x, weight, history, bias = (
        torch.randn(shape, generator=generator) for shape in ((7, 5), (5, width), (5, width - 1), (5,))
    )
    bias = bias if with_bias else None
    y, histories = causal_conv1d(x, weight, bias, history, activation=activation)
    sequence = torch.cat([history, x.T], 1).double()
    expected = F.conv1d(sequence, weight.double().unsqueeze(1), None if bias is None else bias.double(), groups=5).T
    expected = F.silu(expected) if activation else expected
    assert y.dtype == torch.float64
    assert relative_error(y, expected) < EXACT
    for n in range(8):
        assert torch.equal(histories[n], sequence[:, n : n + width - 1])


def test_oracle_by_hand():
    """W = 3, one channel: the newest input's weight comes last."""
    y, histories = causal_conv1d(
        torch.tensor([[5.0], [7.0]]), torch.tensor([[100.0, 10.0, 1.0]]), torch.tensor([0.5]), torch.tensor([[2.0, 3.0]]),
        activation=None,
    )  # fmt: skip
    assert y.flatten().tolist() == [235.5, 357.5]
    assert histories.tolist() == [[[2.0, 3.0]], [[3.0, 5.0]], [[5.0, 7.0]]]

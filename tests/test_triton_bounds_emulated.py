"""Triton's own commit kernel as compiled, with every access checked: no tile reaches past a pool's last value."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from kernel_cases import Case, build
from programs import launch_as
from ptx_emulator.launches import emulated


@pytest.mark.parametrize("programs", ("few", "many"))
@pytest.mark.parametrize("columns", (1, 3), ids=("recover", "columns"))
@pytest.mark.parametrize("V", (96, 288))
def test_values_that_are_no_power_of_two(V, columns, programs, monkeypatch):
    """Tiles of 16 rows divide 96 and 288, but the next power of two is larger."""
    launch_as(programs, monkeypatch)
    x = build(Case("values", 4, K=32, V=V, batch=1), "cpu", torch.bfloat16, torch.bfloat16)
    u, length = torch.randn(x.v.shape), torch.full((1, columns), 3)
    with emulated() as emulator:
        if columns > 1:
            x.commit(u, x.slots, x.slots[:, None].repeat(1, columns), length)
        else:
            x.recover(x.state[x.slots.long()], u, length[:, 0])
    assert emulator.kernels == ["commit_kernel"]

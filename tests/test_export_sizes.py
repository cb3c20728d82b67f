"""The halves of the smallest steps: what has one row or one draft is traced differently. (A window of one token keeps one
state: there is nothing to rewrite.)"""

import pytest
import torch
from exporting import (
    SLOTS,
    assert_same_step,
    convolutions_replaced,
    named_inputs,
    pools_of,
    run_eagerly,
    run_program,
    small_step,
)

from compile_passes import export_step


def inputs_of(batch: int, window: int) -> tuple[torch.Tensor, ...]:
    """Forced drafts make the rows accept different counts, the most of them in the last."""
    generator = torch.Generator().manual_seed(10 * batch + window)
    tokens = torch.randint(0, 256, (batch, window), generator=generator)
    forced = (window - 1 - torch.arange(batch).flip(0)).clamp(min=0)
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    noise = torch.rand(batch, window, generator=generator), torch.rand(batch, 256, generator=generator)
    return tokens, forced.clone(), forced, torch.arange(batch), slots, torch.zeros(batch), *noise


@pytest.mark.parametrize("form", ["operators", "operators, convolutions too", "portable"])
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_halves_equal_the_step(batch, window, form):
    given = inputs_of(batch, window)
    expected, pools_after = run_eagerly(small_step(), given)
    with convolutions_replaced("convolutions" in form):
        exported = export_step(small_step(), given, portable=form == "portable")
    assert exported.report.matched == 1 and exported.manifest.uncut is None
    pools = pools_of(small_step())
    values = named_inputs(exported, given) | pools
    halves = run_program(exported, "verify", values)
    run_program(exported, "commit", values | halves | {"num_accepted": halves["result_1"]})
    assert_same_step([halves["result_0"], halves["result_1"]], pools, expected, pools_after)

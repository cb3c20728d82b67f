"""Steps with random rows, and a recorder that stands in for a GPU's: shared by the tests of captured steps."""

import random

import torch
from serving import DRAFTS, MAX_LENGTH, VOCAB, WINDOW, model_on
from torch import Tensor

from models.pools import Pools
from models.soak import SOAK_CONFIG
from models.speculation import SpeculativeStep
from models.step_inputs import StepInputs

SLOTS = 9


class FakeRecorder:
    """Replays by running again: on what the inputs hold by then, into the results' tensors of the recording."""

    def __init__(self):
        self.warm_ups, self.recordings, self.replays = 0, 0, 0

    def warm_up(self, run):
        self.warm_ups += 1
        run()

    def record(self, run):
        # A recording computes nothing, so its results hold nothing.
        outputs = tuple(torch.full_like(x, -77) for x in run())
        self.recordings += 1

        def replay():
            self.replays += 1
            for static, new in zip(outputs, run(), strict=True):
                static.copy_(new)

        return replay, outputs

    pool_bytes = 2048


def make_step(device) -> SpeculativeStep:
    """A step over pools whose every slot holds something."""
    pools = Pools(SOAK_CONFIG, SLOTS, MAX_LENGTH, device=device, dtype=torch.float64)
    refill(pools)
    return SpeculativeStep(model_on(device), pools)


def refill(pools: Pools, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in pools.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


def staged(size: int, device) -> StepInputs:
    return StepInputs(size, WINDOW, VOCAB, device)


class RandomRows:
    """Fills the inputs of a step: drafts 0 .. T-1, prompts among them, slots of any order, any number of padding rows."""

    def __init__(self, seed: int):
        self.rng, self.lengths = random.Random(seed), set()

    def fill(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        rng = self.rng
        rows = rng.randint(0, inputs.batch)
        windows, drafts, forced = [], [], []
        for _ in range(rows):
            drafts.append(rng.randint(0, DRAFTS))
            forced.append(rng.choice([0, 0, drafts[-1], rng.randint(0, drafts[-1])]))
            windows.append(bytes(rng.randrange(VOCAB) for _ in range(1 + drafts[-1])))
        positions = [rng.randrange(MAX_LENGTH - WINDOW) for _ in range(rows)]
        # Padding rows name slots of their own, as an engine's do.
        slots = rng.sample(range(SLOTS), inputs.batch)
        return inputs.fill(windows, drafts, forced, positions, slots)


def assert_same_bits(actual: Pools, expected: Pools) -> None:
    for (name, a), (_, b) in zip(actual.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(a, b), f"{name} differs by up to {(a - b).abs().max()}"


def check_replays(captured, direct, inputs, steps: int = 40, on_step=lambda: None) -> None:
    """Graphs of all batch sizes against ``direct``, a step function over pools of its own: every bit, at every step.

    ``captured`` and ``direct`` are pairs of a step function and its pools; ``inputs`` the captured ones by batch size.
    """
    rows, seen = RandomRows(5), set()
    refill(captured[1])
    refill(direct[1])
    device = next(captured[1].buffers()).device
    separate = {size: staged(size, device) for size in inputs}
    for i in range(steps):
        # Small batches after large ones, and twice the same.
        size = sorted(inputs, reverse=True)[(i % 5) % len(inputs)]
        state = rows.rng.getstate()
        arguments = rows.fill(inputs[size])
        rows.rng.setstate(state)
        expected = [x.clone() for x in direct[0](*rows.fill(separate[size]))]
        results = captured[0](*arguments)
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b), f"step {i}, batch {size}: {a.tolist()} != {b.tolist()}"
        assert_same_bits(captured[1], direct[1])
        seen.update(expected[1].tolist())
        on_step()
    assert seen == set(range(1, WINDOW + 1)), f"accepted lengths that occurred: {seen}"

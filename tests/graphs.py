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


def contents(pools: Pools) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in pools.named_buffers()}


def assert_contents(pools: Pools, expected: dict[str, Tensor], message: str) -> None:
    for name, buffer in pools.named_buffers():
        difference = (buffer - expected[name]).abs().max()
        assert torch.equal(buffer, expected[name]), f"{message}: {name} differs by up to {difference}"


def check_replays(captured, pools: Pools, inputs: dict[int, StepInputs], steps: int = 40, on_step=lambda: None) -> None:
    """Graphs of all batch sizes against launching the very function that was captured: every bit, at every step.

    ``inputs`` are the captured ones by batch size; every launched step has new ones, which nothing can have been left in.
    """
    rows, seen = RandomRows(5), set()
    refill(pools)
    device = next(pools.buffers()).device
    for i in range(steps):
        # Small batches after large ones, and twice the same.
        size = sorted(inputs, reverse=True)[(i % 5) % len(inputs)]
        before, state = contents(pools), rows.rng.getstate()
        with torch.no_grad():
            expected = [x.clone() for x in captured.step(*rows.fill(staged(size, device)))]
        after = contents(pools)
        for name, buffer in pools.named_buffers():
            buffer.copy_(before[name])
        rows.rng.setstate(state)
        results = captured(*rows.fill(inputs[size]))
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b), f"step {i}, batch {size}: {a.tolist()} != {b.tolist()}"
        assert_contents(pools, after, f"step {i}, batch {size}")
        seen.update(expected[1].tolist())
        on_step()
    assert seen == set(range(1, WINDOW + 1)), f"accepted lengths that occurred: {seen}"

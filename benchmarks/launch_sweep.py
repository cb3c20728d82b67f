"""Launch configurations of the kernels, tried one by one: which there are, what they compile to, how fast they are.

The launchers ask the functions ``..._config`` of ``recoverssm_ops.triton.launch``; a trial replaces them for a while. Nothing
here knows the kernels' arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from unittest import mock

import triton

from benchmarks import kernel_timing as timing
from benchmarks.compilation import compile_launch, only_launch
from benchmarks.inputs import Inputs
from benchmarks.providers import RecoverSSM
from benchmarks.shapes import Shape
from recoverssm_ops import ops
from recoverssm_ops.triton import configs, launch

Config = dict[str, int]
FUNCTIONS = {"verify": ("verify_config", "verify_async_config"), "commit": ("commit_config", "commit_rows_config")}
# Values that a configuration's entries may take; entries of other names stay as they are.
KNOBS = {
    "num_warps": (1, 2, 4, 8), "BV": (16, 32, 64, 128), "STAGES": (1, 2, 3), "num_stages": (1, 2, 3),
    "SHARE": (32, 64, 128), "ROWS": (16, 32), "COLUMNS": (32, 64, 128), "PART": (32, 64, 128),
    "BUFFERS": (1, 2, 3, 4, 6), "AHEAD": (1, 2, 3), "HOLD": (0, 1), "ACCUMULATORS": (2, 3), "maxnreg": (128, 168, 208, 255),
}  # fmt: skip
# Of commit_rows.py, which has no tiles of the matrix unit.
KNOBS_OF_ROWS = {"ROWS": (2, 4, 8, 16), "PART": (16, 32, 64, 128), "GROUP": (2, 4, 16)}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a configuration compiles to; ``failure`` where it does not."""

    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    failure: str = ""


@contextlib.contextmanager
def configured(operation: str, changed: Config) -> Iterator[list[tuple[str, Config]]]:
    """The launcher's choice with entries replaced; yields what it asked, and what it chose by itself."""
    asked = []

    def replaced(name: str) -> Callable[..., Config]:
        choose = getattr(launch, name)

        def config(*arguments: object) -> Config:
            chosen = choose(*arguments)
            asked.append((f"{name}({', '.join(map(str, arguments))})", chosen))
            return chosen | changed

        return config

    with mock.patch.multiple(launch, **{name: replaced(name) for name in FUNCTIONS[operation]}):
        yield asked


def fewest_rows(shape: Shape) -> int:
    """No code depends on how many rows there are, only on which of the launch table's limits they exceed."""
    shared = (configs.ONE_EACH // parts for parts in range(2, 9))  # a head of up to 256 values, 32 or more for each
    for limit in (configs.ONE_WAVE, configs.FOUR_EACH, configs.ONE_WAVE // 2, configs.FEW_PROGRAMS, *shared):
        if shape.batch * shape.num_value_heads > limit:
            return limit // shape.num_value_heads + 1
    return min(shape.batch, 2)


def launched(shape: Shape, operation: str, changed: Config) -> tuple[object, str, Config]:
    """The launch for a shape, without a GPU; the launcher's question; its own answer."""
    provider = RecoverSSM(Inputs(dataclasses.replace(shape, batch=fewest_rows(shape)), 1, "cpu"))
    with (
        mock.patch.object(ops, "kda_verify", launch.verify),
        mock.patch.object(ops, "kda_commit", launch.commit),
    ):
        only_launch(lambda: provider.verify(0))
        call = provider.verify if operation == "verify" else provider.commit
        with configured(operation, changed) as asked:
            noted = only_launch(lambda: call(0))
    ((question, chosen),) = asked
    return noted, question, chosen


def candidates(chosen: Config, value_dim: int, knobs: dict[str, tuple[int, ...]] | None = None) -> list[Config]:
    """Changes to the launcher's choice, the nearest first; the first one changes nothing."""
    ours = KNOBS | (KNOBS_OF_ROWS if "GROUP" in chosen else {})
    knobs = {name: values for name, values in (ours | (knobs or {})).items() if name in chosen}
    widest = max(16, triton.next_power_of_2(value_dim))
    if "BV" in knobs:
        knobs["BV"] = tuple(v for v in knobs["BV"] if v <= widest)
    options = [sorted({*values, chosen[name]}) for name, values in knobs.items()]
    changes = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*options)]
    return sorted(
        changes, key=lambda change: sum(abs(math.log2((1 + v) / (1 + chosen[name]))) for name, v in change.items())
    )


def figures(task: tuple[Shape, str, Config, int]) -> Figures:
    """Compile for ``sm_{arch}``, which also leaves the kernel in Triton's cache."""
    shape, operation, changed, arch = task
    try:
        compiled = compile_launch(launched(shape, operation, changed)[0], arch)
    except Exception as error:
        return Figures(failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
    return Figures(compiled.registers, compiled.spilled_bytes, compiled.shared_bytes)


class Timer:
    """Times configurations of one operation on one shape."""

    def __init__(self, shape: Shape, operation: str, accepted: int, sets: int, device: str) -> None:
        self.operation, self.device, self.sets = operation, device, sets
        self.provider = RecoverSSM(Inputs(shape, sets, device))
        self.provider.inputs.accepted.fill_(accepted)
        for i in range(sets):
            self.provider.verify(i)

    def replay(self, changed: Config) -> Callable[[], object]:
        call = self.provider.verify if self.operation == "verify" else self.provider.commit

        def run() -> None:
            for i in range(self.sets):
                call(i)

        with configured(self.operation, changed):
            return timing.captured(run, self.device)

    def microseconds(self, changes: list[Config], samples: int) -> list[float]:
        """Median time of a launch for each configuration, in turns."""
        replays = {str(at): self.replay(change) for at, change in enumerate(changes)}
        return [t.median for t in timing.interleaved(replays, self.sets, samples, self.device).values()]

"""One shape of the fused kernel's trial: its inputs, the ways that do the same work, their errors and their times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from unittest import mock

from torch import Tensor

from benchmarks import floors, kernel_timing
from benchmarks.fused_kernel import Config, fused_verify
from benchmarks.inputs import Inputs, relative_error
from benchmarks.launch_sweep import Figures
from benchmarks.providers import RecoverSSM, RecoverSSMMerged
from benchmarks.shapes import Shape

# As a serving engine orders a step: the commits of all layers, then their verifies.
SEPARATE = "separate"
# The commits of all layers in one launch.
MERGED = "merged"
# Each layer's verify right after its commit, which may have left the state in the L2 cache. An engine that keeps records until
# the next step, as fusing needs, could do this, too.
ADJACENT = "adjacent"
FUSED = "fused"
WAYS = (SEPARATE, MERGED, ADJACENT, FUSED)
# What another order of the same sums may change, relatively: a rounding of the dtype here and there.
LARGEST_DIFFERENCE = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 1e-5}
# Most float32 configurations spill some hundred bytes a thread; one with thousands would take the time of many others.
MOST_SPILLED = 4096


class FusedTrial:
    """``sets`` layers with the record of a previous window and the inputs of the next; ``accepted`` tokens a row."""

    def __init__(self, shape: Shape, sets: int, accepted: int, device: str) -> None:
        self.shape, self.sets, self.accepted, self.device = shape, sets, accepted, device
        self.window, self.previous = Inputs(shape, sets, device), Inputs(shape, sets, device, seed=1)
        for name in ("states", "slots", "A_log", "dt_bias", "initial"):  # one layer: what stays from step to step
            setattr(self.previous, name, getattr(self.window, name))
        self.previous.accepted.fill_(accepted)
        self.committing, self.verifying = RecoverSSMMerged(self.previous), RecoverSSM(self.window)
        self.outputs: list[tuple[Tensor, Tensor] | None] = [None] * sets
        for i in range(sets):
            self.committing.verify(i)

    def commit_and_verify(self, i: int) -> tuple[Tensor, Tensor]:
        """``o`` and ``u`` of set i's next window by the library's operators."""
        self.committing.commit(i)
        self.verifying.verify(i)
        return self.verifying.o[i], self.verifying.u[i]

    def fused(self, i: int, config: Config) -> tuple[Tensor, Tensor]:
        previous = self.previous
        record = (self.committing.u[i], previous.k[i], previous.g[i])
        self.outputs[i] = fused_verify(self.window, i, *record, previous.accepted, config)
        return self.outputs[i]

    def ways(self) -> dict[str, Callable[[], None]]:
        """The separate kernels, one step of all sets a call."""

        def verify_all() -> None:
            for i in range(self.sets):
                self.verifying.verify(i)

        def separate() -> None:
            for i in range(self.sets):
                self.committing.commit(i)
            verify_all()

        def merged() -> None:
            self.committing.commit_all()
            verify_all()

        def adjacent() -> None:
            for i in range(self.sets):
                self.commit_and_verify(i)

        return {SEPARATE: separate, MERGED: merged, ADJACENT: adjacent}

    def fused_way(self, config: Config) -> Callable[[], None]:
        def fused() -> None:
            for i in range(self.sets):
                self.fused(i, config)

        return fused

    def results(self, step: Callable[[int], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """``o``, ``u`` and the committed states of the checked rows of set 0, from its initial state."""
        x = self.window
        x.reset()
        o, u = step(0)
        committed = x.states[0][x.slots[x.rows].long()]
        return {"o": o[x.rows], "u": u[x.rows], "state": committed}

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        """Against float64: the state from the initial one, ``o`` and ``u`` from the very state that was committed."""
        x = self.window
        _, _, states = self.previous.oracle()
        with mock.patch.object(x, "initial", results["state"]):
            o, u, _ = x.oracle()
        actual = {name: results[name][:, :, x.heads].double().cpu() for name in ("o", "u")}
        actual["state"] = x.checked_states(results["state"])
        truth = {"o": o, "u": u, "state": states[:, self.accepted]}
        return {name: relative_error(actual[name], truth[name]) for name in truth}

    def disagreement(self, results: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
        """What differs by more than another order of the same sums explains; empty if nothing does."""
        pool, data = (LARGEST_DIFFERENCE[name] for name in (self.shape.state_dtype, self.shape.dtype))
        for name, limit in {"state": pool, "u": pool, "o": max(pool, data)}.items():
            difference = relative_error(results[name].double(), expected[name].double())
            if not difference <= limit:
                return f"wrong: {name} differs from the separate kernels' by {difference:.1e}"
        return ""

    def bytes_of(self, way: str) -> int:
        """What must move: three states a row for the separate kernels, two for the fused one."""
        separate = floors.commit_bytes(self.shape, self.accepted) + floors.verify_bytes(self.shape)
        return separate - self.shape.state_bytes if way == FUSED else separate


@dataclasses.dataclass
class Sweep:
    """Configurations of the fused kernel on one shape: what they compile to, what they take, which failed."""

    configs: list[Config]
    figures: dict[int, Figures] = dataclasses.field(default_factory=dict)
    microseconds: dict[int, float] = dataclasses.field(default_factory=dict)

    def runnable(self) -> list[int]:
        """What compiled, without spills first. Moderate ones are not left out: the clock decides."""
        compiled = [at for at, f in self.figures.items() if not f.failure and f.spilled_bytes <= MOST_SPILLED]
        return sorted(compiled, key=lambda at: self.figures[at].spilled_bytes)

    def fail(self, at: int, why: str) -> None:
        self.figures[at] = dataclasses.replace(self.figures[at], failure=why)
        self.microseconds.pop(at, None)

    def as_json(self) -> list[dict]:
        return [
            {**self.configs[at], "us": self.microseconds.get(at), **dataclasses.asdict(figures)}
            for at, figures in sorted(self.figures.items(), key=lambda item: self.microseconds.get(item[0], 1e9))
        ]


def time_trial(trial: FusedTrial, sweep: Sweep, samples: int, deadline: float) -> dict:
    """Configurations briefly for as long as there is time, then the best four and the separate kernels in turns.

    Returns errors, timings and the best configuration; ``sweep`` is filled in.
    """
    expected = trial.results(trial.commit_and_verify)
    errors = {SEPARATE: trial.errors(expected)}
    for at in sweep.runnable():
        if time.monotonic() > deadline and sweep.microseconds:
            break
        config = sweep.configs[at]
        try:
            wrong = trial.disagreement(trial.results(lambda i, config=config: trial.fused(i, config)), expected)
            if wrong:
                sweep.fail(at, wrong)
                continue
            replay = kernel_timing.captured(trial.fused_way(config), trial.device)
            timings = kernel_timing.interleaved({"": replay}, trial.sets, 3, trial.device)
            sweep.microseconds[at] = timings[""].median
            del replay
        except Exception as error:  # too much shared memory, say
            sweep.fail(at, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")
    best = sorted(sweep.microseconds, key=sweep.microseconds.get)[:4]
    replays = {name: kernel_timing.captured(way, trial.device) for name, way in trial.ways().items()}
    for at in best:
        replays[f"{FUSED} {at}"] = kernel_timing.captured(trial.fused_way(sweep.configs[at]), trial.device)
    timings = kernel_timing.interleaved(replays, trial.sets, samples, trial.device)
    for at in best:
        sweep.microseconds[at] = timings[f"{FUSED} {at}"].median
    result = {"timings": {name: timings[name] for name in trial.ways()}, "errors": errors, "config": None}
    if best:
        fastest = min(best, key=sweep.microseconds.get)
        result["config"], result["timings"][FUSED] = fastest, timings[f"{FUSED} {fastest}"]
        actual = trial.results(lambda i: trial.fused(i, sweep.configs[fastest]))
        errors[FUSED] = trial.errors(actual)
        result["equal"] = {name: (actual[name] == expected[name]).double().mean().item() for name in expected}
    return result

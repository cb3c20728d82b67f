"""All providers on one shape: built, checked against the oracle, captured, timed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from benchmarks import floors, peers
from benchmarks import kernel_timing as timing
from benchmarks.inputs import Inputs, relative_error
from benchmarks.peer_providers import PEERS
from benchmarks.providers import OURS, Provider, Unsupported
from benchmarks.shapes import LAYERS, Shape

OPERATIONS = ("verify", "commit", "step")


def sets_of(shape: Shape, arguments: argparse.Namespace) -> int:
    if arguments.compile_only or arguments.warm:
        return 1
    if arguments.sets:
        return arguments.sets
    if arguments.preset == "layers":
        return LAYERS
    return timing.sets_for_cold(floors.verify_bytes(shape), arguments.device)


def accepted_lengths(shape: Shape, arguments: argparse.Namespace) -> list[int]:
    half = max(1, shape.window // 2)
    lengths = arguments.accepted or ([half] if arguments.preset == "layers" else [1, half, shape.window])
    return sorted({min(n, shape.window) for n in lengths})


class ShapeRun:
    """The providers of one shape: built, checked against the oracle, timed. A provider that fails leaves a note."""

    def __init__(self, shape: Shape, names: list[str], arguments: argparse.Namespace, found: peers.Peers) -> None:
        self.shape, self.arguments, self.device = shape, arguments, arguments.device
        self.accepted = accepted_lengths(shape, arguments)
        self.operations = arguments.op or (["step"] if arguments.preset == "layers" else list(OPERATIONS))
        self.inputs = Inputs(shape, sets_of(shape, arguments), arguments.device)
        self.providers: dict[str, Provider] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.notes: dict[str, str] = {}
        for name in names:
            if name not in found.absent:
                with self.noting(name):
                    self.providers[name] = OURS[name](self.inputs) if name in OURS else PEERS[name](self.inputs, found)

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Turn an error into a note about the provider, which is then left out of the shape."""
        try:
            yield
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            unsupported = isinstance(error, Unsupported)
            self.notes[name] = first if unsupported else f"failed: {type(error).__name__}: {first}"
            self.providers.pop(name, None)

    def check(self) -> None:
        """One call of everything, which compiles it, and the errors."""
        o, u, states = self.inputs.oracle()
        for name, provider in list(self.providers.items()):
            with self.noting(name):
                self.inputs.reset()
                provider.reset()
                provider.verify(0)
                errors = {"o": relative_error(self.inputs.checked(provider.o[0]), o)}
                if provider.corrections() is not None:
                    errors["u"] = relative_error(self.inputs.checked(provider.corrections()), u)
                for n in self.accepted if {"commit", "step"} & {*provider.operations} else ():
                    provider.reset()
                    self.inputs.accepted.fill_(n)
                    provider.verify(0)
                    provider.commit(0)
                    actual = self.inputs.checked_states(provider.committed())
                    errors[f"state {n}"] = relative_error(actual, states[:, n])
                self.errors[name] = errors

    def rows(self, bandwidth: float) -> list[dict]:
        rows = []
        for operation in self.operations:
            replays = self._captured(operation)
            half = max(1, self.shape.window // 2)
            lengths = {"verify": [0], "commit": self.accepted, "step": self.accepted}[operation]
            if operation == "step" and half in lengths:
                lengths = [half]
            for n in lengths:
                self.inputs.accepted.fill_(n)
                timings = timing.interleaved(replays, self.launches, self.arguments.samples, self.device)
                rows += [self._row(operation, n, name, t, bandwidth) for name, t in timings.items()]
        for name, note in self.notes.items():
            rows.append({**asdict(self.shape), "provider": name, "note": note})
        return rows

    @property
    def rounds(self) -> int:
        return 20 if self.arguments.warm and torch.device(self.device).type == "cuda" else 1

    @property
    def launches(self) -> int:
        return self.rounds * self.inputs.sets

    def _captured(self, operation: str) -> dict[str, Callable[[], object]]:
        replays = {}
        for name, provider in list(self.providers.items()):
            if operation not in provider.operations:
                continue
            with self.noting(name):
                for i in range(self.inputs.sets):
                    provider.verify(i)  # the records that commits read; a graph's own would go with the graph
                call = self._calls(provider, operation)
                replays[name] = timing.captured(call, self.device)
        return replays

    def _calls(self, provider: Provider, operation: str) -> Callable[[], None]:
        sets = range(self.inputs.sets)

        def call() -> None:
            for _ in range(self.rounds):
                if operation != "commit":
                    for i in sets:
                        provider.verify(i)
                if operation == "commit":
                    for i in sets:
                        provider.commit(i)
                if operation == "step":
                    provider.commit_all()

        return call

    def _row(self, operation: str, accepted: int, name: str, t: timing.Timing, bandwidth: float) -> dict:
        verify, commit = floors.verify_bytes(self.shape), floors.commit_bytes(self.shape, accepted)
        least = {"verify": verify, "commit": commit, "step": verify + commit}[operation]
        moved = self.providers[name].bytes_moved(operation, accepted)
        floor = 1e6 * least / bandwidth
        errors = self.errors[name]
        return {
            **asdict(self.shape), "operation": operation, "accepted": accepted or None, "provider": name,
            "us": t.median, "us_quartiles": [t.low, t.high], "sets": self.inputs.sets, "bytes_moved": moved,
            "gigabytes_per_s": 1e-3 * moved / t.median, "bytes_floor": least, "floor_us": floor,
            "times_floor": t.median / floor, "error_o": errors.get("o"), "error_u": errors.get("u"),
            "error_state": errors.get(f"state {accepted}"),
        }  # fmt: skip

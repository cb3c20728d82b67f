"""Progress of long work: a bar on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0


class Stage:
    """``total`` things to do; where there is no terminal, lines are the only sign of life, and what a killed run leaves."""

    def __init__(self, description: str, total: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[status]}"), console=console, refresh_per_second=4)
        self._task = self._bar.add_task(description, total=total, status="")
        self._console, self._last_line = console, time.perf_counter()

    def __enter__(self) -> Stage:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, advance: int = 0, **changed: str) -> None:
        """``changed``: the description, the status behind the bar."""
        self._bar.update(self._task, advance=advance, **changed)
        if not self._console.is_terminal and time.perf_counter() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.perf_counter()
            (task,) = self._bar.tasks
            status = f", {task.fields['status']}" if task.fields["status"] else ""
            line = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}{status}"
            self._console.print(line, highlight=False, markup=False)


def each(items: Sequence, description: str, console: Console) -> Iterator:
    with Stage(description, len(items), console) as stage:
        for item in items:
            yield item
            stage.update(advance=1)

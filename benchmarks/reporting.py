"""What all benchmarks show and write."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from models.interruption import Interruptible


def console_for_tables() -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def progress_over(items: Iterable, total: int, description: str, console: Console) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.update(task, advance=1)


def machine(device: str) -> dict[str, str | None]:
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def write_json(arguments: argparse.Namespace, about: dict, figures: list[dict]) -> None:
    """To ``--json``, if given: the settings, what they were measured on, and the figures."""
    if arguments.json is None:
        return
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    result = {"settings": settings, **about, "figures": figures}
    replace_text(arguments.json, json.dumps(result, indent=2) + "\n")


def measure_all(
    sizes: Sequence, measure: Callable[..., list[dict]], arguments: argparse.Namespace, about: dict, console: Console
) -> tuple[list[dict], int]:
    """The figures of ``measure(*size, arguments)``, written after every size, and the exit status: 130 where Ctrl-C or
    SIGTERM came before the last of them."""
    figures = []
    with Interruptible() as work:
        for size in progress_over(sizes, len(sizes), "measuring", console):
            figures += measure(*size, arguments)
            write_json(arguments, about, figures)
    return figures, 130 if work.interrupted else 0


def replace_text(path: Path, text: str) -> None:
    """The file is always a whole one, whenever the program is killed."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: this PyTorch sees no CUDA GPU; use --device cpu")


def check_at_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace, **least: int) -> None:
    """Refuse numbers, and lists with a number, below what they should at least be; None passes."""
    for name, bound in least.items():
        values = getattr(arguments, name)
        smallest = min(values) if isinstance(values, list) else values
        if smallest is not None and smallest < bound:
            parser.error(f"--{name.replace('_', '-')} should be at least {bound}, got {smallest}")

"""Prompts for the demo: excerpts of held-out modules, so that nothing shown was memorised."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from models.corpus import HELD_OUT, read_source

# The first request's module, then the others in a fixed order.
FIRST = "dataclasses.py"


def held_out_prompts(count: int, length: int, root: Path | None = None) -> list[bytes]:
    """``count`` excerpts of about ``length`` bytes, each from another place, of differing lengths (a ragged batch).

    Every excerpt starts at the beginning of a line. More requests than modules take later excerpts of the same modules.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = [FIRST, *sorted(HELD_OUT - {FIRST})]
    sources = [source for name in names if (source := read_source(root / name)) is not None]
    prompts = []
    for i in range(count):
        source = sources[i % len(sources)]
        size = max(1, length - length * (i % 4) // 8)
        # A third into the module: past the licence and the imports, into code.
        offset = len(source) // 3 + (i // len(sources)) * length
        offset %= max(1, len(source) - size)
        start = source.find(b"\n", offset) + 1
        prompts.append(source[start : start + size])
    return prompts

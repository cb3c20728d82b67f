"""Training text: the source of the running interpreter's standard library.

It is on every machine that runs Python, and whole modules can be held out by name.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Not the library itself, generated per machine, or (lib2to3's and the tests' data) not meant to be read.
EXCLUDED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "ensurepip", "_vendor"}
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")

# Whole modules, present in every supported Python, that no training ever sees: about 5 % of the text. The demo's
# prompts and the figures of the model card come from them.
HELD_OUT = frozenset(
    {
        "argparse.py",
        "bisect.py",
        "calendar.py",
        "contextlib.py",
        "dataclasses.py",
        "fractions.py",
        "ftplib.py",
        "heapq.py",
        "shutil.py",
        "socketserver.py",
        "statistics.py",
        "textwrap.py",
        "tempfile.py",
        "queue.py",
    }
)
# Held out too, but looked at during training: which weights to keep is decided on these.
VALIDATION = frozenset({"cmd.py", "fileinput.py", "mailbox.py", "random.py", "selectors.py", "zipapp.py"})

# Stands between files, so that a file's beginning does not depend on the one before. No Python source holds it.
SEPARATOR = b"\0"


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The corpus' files in a fixed order (by relative path)."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if EXCLUDED_DIRECTORIES.isdisjoint(parts[:-1]) and not parts[0].startswith(EXCLUDED_PREFIXES):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_of(path: Path, root: Path) -> str:
    """``train``, ``validation`` or ``held_out``, by the path: a package's own ``queue.py`` is another module."""
    name = path.relative_to(root).as_posix()
    if name in HELD_OUT:
        return "held_out"
    return "validation" if name in VALIDATION else "train"


def read_splits(root: Path | None = None) -> dict[str, bytes]:
    """The text of each split, every file preceded by a separator. Files that are not UTF-8 are left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    splits: dict[str, list[bytes]] = {"train": [], "validation": [], "held_out": []}
    for path in stdlib_files(root):
        text = read_source(path)
        if text is not None:
            splits[split_of(path, root)].append(SEPARATOR + text)
    return {name: b"".join(texts) for name, texts in splits.items()}


def read_source(path: Path) -> bytes | None:
    """The file's bytes with Unix line ends, or None where they are not UTF-8 text."""
    data = path.read_bytes().replace(b"\r\n", b"\n")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if SEPARATOR in data else data

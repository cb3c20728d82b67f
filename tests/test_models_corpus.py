"""The training text, its splits, and the demo's prompts from the held-out part."""

import sysconfig
from pathlib import Path

import pytest

from models.corpus import HELD_OUT, SEPARATOR, VALIDATION, read_splits, stdlib_files
from models.prompts import held_out_prompts

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture
def library(tmp_path):
    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    write("argparse.py", b"held out\n")
    write("random.py", b"validation\n")
    write("zlib2.py", b"crlf\r\nline\n")
    write("asyncio/queue.py", b"# not the held-out queue.py: h\xc3\xa9\n")
    write("ascii.py", b"first\n")
    for name in (
        "test/a.py",
        "unittest/test/b.py",
        "idlelib/idle_test/c.py",
        "site-packages/d.py",
        "lib2to3/e.py",
        "json/__pycache__/f.py",
        "_sysconfigdata__linux.py",
        "config-3.12-x/g.py",
    ):
        write(name, b"excluded\n")
    write("latin.py", b"# caf\xe9\n")
    write("binary.py", b"x = '\0'\n")
    write("notes.txt", b"not Python\n")
    return tmp_path


def test_splits_of_a_small_library(library):
    assert read_splits(library) == {
        "train": b"\0first\n\0# not the held-out queue.py: h\xc3\xa9\n\0crlf\nline\n",
        "validation": b"\0validation\n",
        "held_out": b"\0held out\n",
    }


def test_order_does_not_depend_on_the_file_system(library, monkeypatch):
    expected = stdlib_files(library)
    found = list(library.rglob("*.py"))
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(found))
    assert stdlib_files(library) == expected


def test_every_held_out_module_exists_and_they_are_a_twentieth():
    for name in HELD_OUT | VALIDATION:
        assert (STDLIB / name).is_file(), name
    assert HELD_OUT.isdisjoint(VALIDATION)
    splits = read_splits()
    total = sum(map(len, splits.values()))
    assert 0.03 < len(splits["held_out"]) / total < 0.08
    assert 0.01 < len(splits["validation"]) / total < 0.03
    assert splits["held_out"].count(SEPARATOR) == len(HELD_OUT)
    # Nothing held out is in the training text under another name.
    for name in HELD_OUT:
        assert (STDLIB / name).read_bytes().replace(b"\r\n", b"\n") not in splits["train"]


def test_prompts_are_ragged_distinct_and_held_out():
    prompts = held_out_prompts(20, 200)
    held_out = read_splits()["held_out"]
    assert len(set(prompts)) == 20
    assert len({len(p) for p in prompts}) == 4
    for prompt in prompts:
        assert 0 < len(prompt) <= 200
        assert b"\n" + prompt in held_out
    assert prompts == held_out_prompts(20, 200)

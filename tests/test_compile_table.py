"""Every kernel variant for every generation of GPUs, against the pinned table: ``python -m benchmarks.compile_table``."""

import dataclasses
import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton

from benchmarks import compile_table
from benchmarks.compile_table import PATH, CompileTable, Row, architectures_of, compile_variant, differences
from benchmarks.kernel_variants import VARIANTS

PAIRS = [(name, arch) for name in VARIANTS for arch in architectures_of(name)]
PINNED = CompileTable.parse(PATH.read_text())
# Blocks of the smallest supported GPUs of each generation (8.6, 12.0) can have 99 KiB.
SHARED_LIMIT = 99 * 1024
# The sizes of the models this is for: commits must not spill where the kernels were tuned, and verify by no more than two
# registers (at that, more programs at once are the faster way). On other generations, and in float32 with another Triton
# than it was tuned with, a few may spill.
MAIN = ("verify_bf16_T4", "verify_bf16_T8", "verify_fp32_T4", "verify_fp32_T8", "commit_bf16", "commit_fp32")
# Of another Triton than the pinned one, too: four bytes stored and four loaded for each register too many.
SLACK = 256
UPDATE = "if that is meant: python -m benchmarks.compile_table --update"


@pytest.mark.parametrize(("name", "arch"), PAIRS, ids=[f"{name}-sm_{arch}" for name, arch in PAIRS])
def test_as_pinned(name, arch):
    compiled = compile_variant(name, arch)
    assert ".f64" not in compiled.ptx, "a float64 instruction: a Python float reached the kernel as a double"
    assert compiled.shared_bytes <= SHARED_LIMIT
    if name.startswith("conv"):
        assert compiled.shared_bytes <= 4096, "a shift of values between threads of a row-wise kernel"
    row = PINNED.rows[name]
    registers, shared, spilled = row.cells[arch]
    if PINNED.triton != triton.__version__:
        assert name not in MAIN or compiled.spilled_bytes <= SLACK, f"{compiled.spilled_bytes} bytes of spills"
        return
    if spilled == 0:
        assert compiled.spilled_bytes == 0, f"{compiled.spilled_bytes} bytes of spills appeared"
    actual = (compiled.kernel, compiled.num_warps, compiled.registers, compiled.shared_bytes, compiled.spilled_bytes)
    assert actual == (row.kernel, row.warps, registers, shared, spilled), UPDATE


def test_the_table_holds_every_variant():
    assert [*PINNED.rows] == [*VARIANTS], UPDATE


def test_main_variants_do_not_spill():
    for name in MAIN:
        for arch, (_, _, spilled) in PINNED.rows[name].cells.items():
            tuned = 16 if name.startswith("verify_bf16") else 0
            allowed = SLACK if name.startswith("verify_fp32") or arch != 90 else tuned
            assert spilled <= allowed, (name, arch)


def test_a_table_reads_back_as_written():
    assert CompileTable.parse(str(PINNED)) == PINNED


def test_what_differs_is_named():
    name = "commit_bf16"
    row = PINNED.rows[name]
    other = dataclasses.replace(row, cells=row.cells | {80: (255, 64, 8)})
    changed = dataclasses.replace(PINNED, rows=PINNED.rows | {name: other, "new": Row("kernel", 1, {})})
    assert [line.split(":")[0] for line in differences(PINNED, changed)] == [name, "new"]
    assert differences(PINNED, PINNED) == []


def test_the_command_compares_and_updates(tmp_path, monkeypatch, capsys):
    """On two small variants, whose figures it must find again; one of them is then pinned wrongly."""
    names = ["conv_verify_T1", "conv_commit_narrowest"]
    monkeypatch.setattr(compile_table, "PATH", tmp_path / "table.txt")
    monkeypatch.setattr(compile_table, "VARIANTS", {name: VARIANTS[name] for name in names})
    assert compile_table.main(["--update", "--jobs", "1"]) == 0
    table = CompileTable.parse((tmp_path / "table.txt").read_text())
    assert [*table.rows] == names and table.triton == triton.__version__
    assert compile_table.main(["--jobs", "1"]) == 0
    assert "As pinned." in capsys.readouterr().out
    registers, shared, spilled = table.rows[names[0]].cells[80]
    wrong = str(table).replace(f"{registers}/{shared}/{spilled}", f"{registers + 1}/{shared}/{spilled}")
    (tmp_path / "table.txt").write_text(wrong)
    assert compile_table.main(["--jobs", "1"]) == 1
    assert f"{names[0]}:" in capsys.readouterr().out

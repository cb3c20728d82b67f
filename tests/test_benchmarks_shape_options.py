"""The options that name shapes: every combination is one, and what cannot be a shape is refused before anything runs."""

import argparse

import pytest

pytest.importorskip("triton")

from benchmarks import kernels, launch_table
from benchmarks.shape_options import add_shape_options, shapes_of
from benchmarks.shapes import Shape

COMMANDS = pytest.mark.parametrize("command", (kernels, launch_table), ids=lambda module: module.__name__)


def test_every_combination_is_a_shape():
    parser = argparse.ArgumentParser()
    add_shape_options(parser, batch=[1, 64], heads=[12], window=[8], state_dtype=["bf16"])
    assert shapes_of(parser.parse_args([])) == [Shape(1, 12, 8), Shape(64, 12, 8)]
    options = "--batch 2 --heads 1 2 --window 3 5 --head-size 16 --value-heads 4 --state-dtype fp32 --dtype fp16"
    shapes = shapes_of(parser.parse_args([*options.split(), "--gate", "bounded", "unbounded", "--scalar-gate"]))
    assert shapes == [
        Shape(2, heads, window, "fp32", 16, 4, gate, True, "fp16")
        for gate in ("bounded", "unbounded")
        for heads in (1, 2)
        for window in (3, 5)
    ]


@COMMANDS
def test_both_commands_take_them(command):
    arguments = command.parse_arguments(["--device", "cpu", "--heads", "16", "--value-heads", "32", "--scalar-gate"])
    assert {(shape.heads, shape.num_value_heads, shape.scalar_gate) for shape in shapes_of(arguments)} == {
        (16, 32, True)
    }


@COMMANDS
@pytest.mark.parametrize(
    ("options", "message"),
    (
        ("--batch 0", "--batch should be at least 1, got 0"),
        ("--heads 2 0", "--heads should be at least 1, got 0"),
        ("--window 0", "--window should be at least 1, got 0"),
        ("--head-size -8", "--head-size should be at least 1, got -8"),
        ("--value-heads -4", "--value-heads should be at least 0, got -4"),
        ("--heads 2 3 --value-heads 4", "--value-heads should be a multiple of --heads 3, got 4"),
        ("--jobs -1", "--jobs should be at least"),
    ),
)
def test_what_is_no_shape_is_refused(command, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.parse_arguments(["--device", "cpu", *options.split()])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@COMMANDS
def test_a_gpu_that_is_not_there_is_refused(command, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.parse_arguments(["--device", "cuda"])
    assert "sees no CUDA GPU" in capsys.readouterr().err

"""The logger ``compile_passes``: silent unless asked, one line a layer, and a warning where nothing was rewritten."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rewriting import run_rewritten
from small_layer import MEAN_OF_STATES, STATE_RETURNED, make_inputs
from spellings import Spelling, Step, inputs
from torch._inductor import config

from compile_passes import REASONS, explain
from compile_passes.backend import recoverssm
from compile_passes.reporting import log

S = Spelling(T=2)


class Two(torch.nn.Module):
    """Layers inside submodules, as models have them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Step(S) for _ in range(2))

    def forward(self, states, layers, slots, n):
        return [layer(states[i : i + 1], layers[i : i + 1], slots, n) for i, layer in enumerate(self.layers)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(log, "_said", set())
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def messages(caplog, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "compile_passes" and r.levelno == level]


def test_info_is_a_line_for_every_layer_and_names_module_and_source(caplog):
    with caplog.at_level(logging.INFO, "compile_passes"):
        run_rewritten(Two(), *inputs(Spelling(T=2, layers=2)))
    lines = messages(caplog, logging.INFO)
    assert len(lines) == 2 and not messages(caplog, logging.DEBUG)
    for i, line in enumerate(lines):
        assert line.startswith(f"rewrote layers.{i} (commit), 2.2 KiB of states -> 288 B: spellings.py:")


def test_info_says_why_a_layer_is_left_alone_and_debug_says_the_cure(caplog):
    reason = "state_escapes"
    with caplog.at_level(logging.DEBUG, "compile_passes"):
        run_rewritten(STATE_RETURNED, *make_inputs())
    (line,) = messages(caplog, logging.INFO)
    assert f"alone, {reason}: small_layer.py:" in line
    details = "\n".join(messages(caplog, logging.DEBUG))
    assert REASONS[reason] in details and "states stacked at small_layer.py:" in details


def test_table_shows_modules():
    text = str(explain(Two(), *inputs(Spelling(T=2, layers=2))))
    header, _, first, second, *_ = text.splitlines()
    assert header.split()[:2] == ["layer", "module"]
    assert (first.split()[:2], second.split()[:2]) == (["0", "layers.0"], ["1", "layers.1"])
    assert "states after every position 4.5 KiB -> 576 B" in text


# --- the warning --------------------------------------------------------------------------------------------------------


def compile_and_run(fn, *args, grad=False):
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(fn, backend=recoverssm)(*args)


def test_b29_a_graph_without_any_rewritten_layer_is_a_warning_once(caplog):
    for _ in range(2):
        compile_and_run(STATE_RETURNED, *make_inputs())
    (line,) = messages(caplog, logging.WARNING)
    assert "rewrote 0 layers" in line and "state_escapes at small_layer.py:" in line
    assert "compile_passes.explain(fn, *args)" in line and "Gradients" not in line

    compile_and_run(MEAN_OF_STATES, *make_inputs())
    assert len(messages(caplog, logging.WARNING)) == 2, "other layers are another warning"


def test_a_graph_without_windows_warns_until_something_was_rewritten(caplog):
    compile_and_run(lambda x: x + 1, torch.randn(3))
    compile_and_run(lambda x: x + 2, torch.randn(3))
    (line,) = messages(caplog, logging.WARNING)
    assert "no per-position states found" in line


def test_a_prompt_beside_rewritten_windows_is_no_warning(caplog):
    compile_and_run(Step(S), *inputs(S))
    compile_and_run(lambda x: x + 1, torch.randn(3))
    assert not messages(caplog, logging.WARNING)


def test_the_warning_tells_of_gradients(caplog):
    s = Spelling(T=2, checkpoint="functional")
    states, layers, slots, n = inputs(s)
    layers[0]["k"].requires_grad_()
    compile_and_run(Step(s), states, layers, slots, n, grad=True)
    (line,) = messages(caplog, logging.WARNING)
    assert "torch.no_grad()" in line


# --- TORCH_LOGS ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from rewriting import run_rewritten
from spellings import Spelling, Step, inputs
run_rewritten(Step(Spelling(T=2)), *inputs(Spelling(T=2)))
"""


@pytest.mark.parametrize(
    ("torch_logs", "info", "debug"),
    [(None, False, False), ("compile_passes", True, False), ("+compile_passes", True, True)],
    ids=["unset", "info", "debug"],
)
def test_torch_logs_shows_the_logger_and_without_it_there_is_silence(torch_logs, info, debug):
    root = Path(__file__).resolve().parent.parent
    program = PROGRAM.format(paths=[str(root), str(root / "tests")])
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    # TORCH_LOGS is read while torch is imported, and looks the module up then.
    environment |= {"PYTHONPATH": str(root)} | ({"TORCH_LOGS": torch_logs} if torch_logs else {})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("rewrote" in done.stderr) == info
    assert ("states stacked in node" in done.stderr) == debug

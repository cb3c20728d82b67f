"""How the kernels' tests are run under compute-sanitizer. The tool here prints what the real one would, and runs the tests."""

import os
import signal
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import sanitize
import torch

pytest.importorskip("triton")
import planted_mistakes
from ptx_emulator import PTXError
from ptx_emulator.launches import emulated

from benchmarks.compilation import Launch, compile_launch

RACE = """\
========= Error: Race reported between Write access at verify_kernel+0x13d0 in verify.py:38
=========     and Write access at verify_kernel+0x13d0 in /library/verify.py:38 [64 hazards]
========= 
"""
READ = """\
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x90 in {file}:{line}
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f0000000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f0000000000 of size 512 bytes
========= 
"""
PLANTED = READ.format(kernel="read_past_the_end", file="planted_mistakes.py", line=18)
TOOL = """\
#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
end = arguments.index({python!r})
options, command = dict(zip(arguments[:end:2], arguments[1:end:2])), arguments[end:]
known = {{"--tool", "--show-backtrace", "--print-limit", "--log-file"}}
assert options.keys() == known | ({{"--padding"}} if options["--tool"] == "memcheck" else set()), options
with open(options["--log-file"], "w") as log:
    log.write("========= COMPUTE-SANITIZER\\n")
    planted = "planted_mistakes" in command[-1]
    log.write({planted!r} if planted else {found!r})
    log.flush()
    failed = 0 if planted else subprocess.call(command)
    if failed:
        log.write("========= Target application returned an error\\n")
    log.write("========= ERROR SUMMARY: 0 errors\\n")
sys.exit(failed)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """``sanitize.main`` on tests of this text, with a tool that reports ``found``; the exit status and what was printed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to load than these tests to run

    def run(tests, *options, found="", planted=PLANTED):
        tool, file = tmp_path / "tool", tmp_path / "test_kernels.py"
        tool.write_text(TOOL.format(python=sys.executable, found=found, planted=planted))
        tool.chmod(0o755)
        file.write_text(textwrap.dedent(tests))
        arguments = [file, "--sanitizer", tool, "--jobs", "2", "--logs", tmp_path / "logs", *options]
        status = sanitize.main([str(x) for x in arguments])
        return status, capsys.readouterr().out

    return run


GOOD = """
    import os, pytest

    @pytest.mark.parametrize("i", range(5))
    def test_kernel(i):
        assert os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == os.environ.get("EXPECTED")

    @pytest.mark.parametrize("order", ["slot, channel"])
    def test_one_graph_replays(order):
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ

    @pytest.mark.skip
    def test_of_two_gpus():
        pass
"""


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_every_test_runs_once(tool, run, tmp_path, monkeypatch):
    if tool == "memcheck":
        monkeypatch.setenv("EXPECTED", "1")
    status, printed = run(GOOD, "--tool", tool)
    assert status == 0, printed
    row = [cell.strip() for cell in next(line for line in printed.splitlines() if "│ " + tool in line).split("│")[1:-1]]
    assert row[:-1] == [tool, "7 of 7", "6", "1", "0", "0", "reported"]
    parts = {path.name for path in (tmp_path / "logs" / tool).iterdir()}
    assert parts == {"planted", "00", "01"} | ({"02"} if tool == "memcheck" else set())


def test_reports_are_counted_by_line_of_the_kernel(run):
    found = RACE * 2 + READ.format(kernel="commit_rows_kernel", file="commit_rows.py", line=7)
    status, printed = run("def test_kernel(): pass", "--tool", "racecheck", found=found)
    assert status == 1
    assert "4 x verify_kernel at verify.py:38" in printed and "1 x commit_rows_kernel at commit_rows.py:7" in printed
    assert "2 x Error: Race reported between" in printed and "1 x Invalid __global__ read" in printed


@pytest.mark.parametrize("planted", ("", "========= Error: No attachable process found.\n"))
def test_a_tool_that_sees_nothing_has_shown_nothing(planted, run):
    status, printed = run("def test_kernel(): pass", "--tool", "memcheck", planted=planted)
    assert status == 1 and "NOT REPORTED" in printed


def test_a_failed_test_is_named(run):
    status, printed = run("def test_kernel():\n    assert 1 == 2", "--tool", "memcheck")
    assert status == 1 and "test_kernels.py::test_kernel - assert 1 == 2" in printed
    assert "reported" in printed and "NOT" not in printed


def test_tests_that_end_the_process_are_told(run):
    tests = """
        import os, sys

        def test_kernel():
            print("no memory left", file=sys.__stderr__)
            os._exit(3)
    """
    status, printed = run(tests, "--tool", "racecheck")
    assert status == 1 and "00 broke off" in printed


@pytest.fixture
def after_two_tests(tmp_path, monkeypatch):
    """``after_two_tests(do)``: what to do at the first look at the clock after two tests have passed."""

    def after(do):
        def now():
            logs = [log.read_text() for log in (tmp_path / "logs").rglob("tests.log")]
            return do() if "".join(logs).count(" PASSED") == 2 else 0.0

        monkeypatch.setattr(sanitize, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))

    return after


ENDLESS = """
    import time

    def test_first(): pass

    def test_second(): pass

    def test_endless(): time.sleep(60)
"""


def test_the_limit_stops_what_is_left(run, after_two_tests):
    after_two_tests(lambda: 61.0)
    status, printed = run(ENDLESS, "--limit", "60", "--tool", "racecheck")
    assert status == 1 and "2 of 3" in printed and "broke off" not in printed


def test_what_has_been_seen_is_shown_if_interrupted(run, after_two_tests):
    def interrupt():
        after_two_tests(lambda: 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    after_two_tests(interrupt)
    status, printed = run(ENDLESS, "--tool", "racecheck", "memcheck")
    assert status == 130 and "2 of 3" in printed and "│ memcheck " not in printed


def test_a_part(run):
    status, printed = run(GOOD, "--tool", "racecheck", "-k", "graph or two_gpus")
    assert "2 of 2" in printed and status == 0


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (["--jobs", "0"], "--jobs: at least one process, not 0"),
        (["--sanitizer", "no-such-program"], "there is no program 'no-such-program'"),
        (["--logs", "."], "--logs: . holds files already"),
        ([], "torch sees no CUDA GPU"),
    ),
)
def test_bad_options(options, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        sanitize.main(["--sanitizer", sys.executable, *options])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
def test_the_planted_mistakes_are_mistakes():
    x = torch.zeros(128)
    with emulated(), pytest.raises(PTXError, match="outside"):
        planted_mistakes.read_past_the_end[(1,)](x, torch.zeros(128), 128)
    race = Launch(
        planted_mistakes.read_without_a_barrier, (1,), (torch.zeros(128, dtype=torch.int32), 128), {"num_warps": 4}
    )
    ptx = compile_launch(race, 90).ptx
    store, load = (ptx.index(f"{access}.volatile.shared") for access in ("st", "ld"))
    assert store < load and "bar.sync" not in ptx[store:load]


def test_no_test(run):
    with pytest.raises(SystemExit, match="no tests"):
        run("def test_kernel(): pass", "-k", "other")

"""The Triton kernels on the CPU, through Triton's interpreter: float32 and float16 (it computes bf16 wrongly).

The interpreter is chosen by an environment variable when Triton is first imported, so these tests run in a process of
their own.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    @pytest.mark.parametrize("part", range(2))
    def test_interpreted(part):
        """Run the tests below, half of them at a time, in a process that interprets kernels."""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "KERNEL_PART": str(part), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 20, run.stdout

else:
    pytest.importorskip("triton")
    import kernel_checks as checks
    from kernel_cases import CASES
    from programs import launch_as

    PART = os.environ.get("KERNEL_PART")
    MINE = CASES if PART is None else CASES[int(PART) :: 2]
    POOLS = {"fp32": torch.float32, "fp16": torch.float16}

    @pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
    def test_parity_fp32(case):
        checks.parity(case, "cpu", torch.float32, torch.float32)

    @pytest.mark.parametrize("case", MINE[::3], ids=lambda case: case.name)
    def test_parity_fp16(case):
        checks.parity(case, "cpu", torch.float16, torch.float16)

    @pytest.mark.parametrize("case", MINE[1::4], ids=lambda case: case.name)
    def test_parity_of_a_full_gpu(case, monkeypatch):
        """As launched where programs are many: all of the above are few."""
        launch_as("many", monkeypatch)
        checks.parity(case, "cpu", torch.float32, torch.float32)

    @pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
    @pytest.mark.parametrize("check", checks.CHECKS if PART in (None, "0") else [], ids=lambda check: check.__name__)
    def test_behaviour(check, pool):
        check("cpu", pool)

    MANY = [check for check in checks.CHECKS if check is not checks.later_tokens_do_not_reach_earlier_ones]

    @pytest.mark.parametrize("check", MANY if PART in (None, "1") else [], ids=lambda check: check.__name__)
    def test_behaviour_of_a_full_gpu(check, monkeypatch):
        launch_as("many", monkeypatch)
        check("cpu", torch.float32)

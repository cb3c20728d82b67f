"""The all-layers kernels on the CPU, through Triton's interpreter: float32 and float16 (it computes bf16 wrongly).

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

    def test_interpreted():
        """Run the tests below in a process that interprets kernels."""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 30, run.stdout

else:
    pytest.importorskip("triton")
    import layers_kernel_checks as checks

    DTYPES = {
        "fp32": (torch.float32, torch.float32),
        "fp16": (torch.float16, torch.float16),
        "fp16_data_fp32_pool": (torch.float16, torch.float32),
    }

    @pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.name)
    def test_parity_fp32(case):
        checks.parity(case, "cpu", torch.float32, torch.float32)

    @pytest.mark.parametrize("case", checks.CONV_CASES, ids=lambda case: case.name)
    def test_conv_parity_fp32(case):
        checks.conv_parity(case, "cpu", torch.float32, torch.float32)

    @pytest.mark.parametrize("dtypes", list(DTYPES.values())[1:], ids=list(DTYPES)[1:])
    @pytest.mark.parametrize("case", checks.CASES[:-2:5], ids=lambda case: case.name)
    def test_parity(case, dtypes):
        checks.parity(case, "cpu", *dtypes)

    @pytest.mark.parametrize("dtypes", list(DTYPES.values())[1:], ids=list(DTYPES)[1:])
    @pytest.mark.parametrize("case", checks.CONV_CASES[::4], ids=lambda case: case.name)
    def test_conv_parity(case, dtypes):
        checks.conv_parity(case, "cpu", *dtypes)

    @pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
    @pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
    def test_behaviour(check, dtypes):
        check("cpu", *dtypes)

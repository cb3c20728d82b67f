"""Every operator test runs on the CPU, and on CUDA where there is one."""

import os

import pytest
import torch
from hypothesis import settings

# Of packages the compiler's time counts here; the kernels in them are optimised all the same.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Inductor tries the vector instructions that the CPU says it has, four seconds for every empty cache; here they are believed.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Seeded: a run that fails fails again. The first example may wait for a Triton compilation, so no deadline.
settings.register_profile("recoverssm", derandomize=True, deadline=None)
settings.load_profile("recoverssm")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)

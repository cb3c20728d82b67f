"""Kernels launched as where programs are few, where all of them run at once, six on each multiprocessor or fewer, and where
they are many: a test's own are few."""

import pytest

from recoverssm_ops.triton import configs

LIMITS = {
    "few": (configs.FEW_PROGRAMS, configs.FOUR_EACH, configs.ONE_WAVE),
    "wave": (0, configs.FOUR_EACH, configs.ONE_WAVE),
    "full wave": (0, 0, configs.ONE_WAVE),
    "many": (0, 0, 0),
}


def launch_as(programs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in zip(("FEW_PROGRAMS", "FOUR_EACH", "ONE_WAVE"), LIMITS[programs], strict=True):
        monkeypatch.setattr(configs, name, limit)

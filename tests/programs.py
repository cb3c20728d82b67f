"""Kernels launched as where programs are few, where all run at once (up to four on each multiprocessor: a wave; up to six: a
full one), and where they are many: a test's own are few."""

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

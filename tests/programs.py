"""Kernels launched as where programs are the fewest (there are multiprocessors for parts of them), few, where all run at once
(up to four on each multiprocessor: a wave; up to six: a full one), and where they are many: a test's own are the fewest."""

import pytest

from recoverssm_ops.triton import configs

NAMES = ("FEW_PROGRAMS", "ONE_EACH", "FOUR_EACH", "ONE_WAVE")
FEW, ONE, FOUR, WAVE = (getattr(configs, name) for name in NAMES)
LIMITS = {
    "fewest": (FEW, ONE, FOUR, WAVE),
    "few": (FEW, 0, FOUR, WAVE),
    "wave": (0, 0, FOUR, WAVE),
    "full wave": (0, 0, 0, WAVE),
    "many": (0, 0, 0, 0),
}


def launch_as(programs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in zip(NAMES, LIMITS[programs], strict=True):
        monkeypatch.setattr(configs, name, limit)

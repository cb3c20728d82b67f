"""Long work that can be stopped without losing what is done."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interruptible:
    """Ctrl-C and SIGTERM (a time limit's signal) end the block, not the program.

    ::

        with Interruptible() as work:
            ...
        show_what_is_done()
        return 130 if work.interrupted else 0

    For the main thread. Behind the block both do again what they did before it.
    """

    interrupted = False

    def __enter__(self) -> Interruptible:
        self._before = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        signal.signal(signal.SIGTERM, self._before)
        self.interrupted = kind is KeyboardInterrupt
        return self.interrupted


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

"""What went wrong, and in which statement."""


class PTXError(RuntimeError):
    """A program did what it must not, or what the emulator does not know. ``reason`` is without the statement."""

    def __init__(self, reason: str, at: str = ""):
        super().__init__(f"{reason}\n  in {at}" if at else reason)
        self.reason = reason

"""A request as the engine sees it, and the window it asks for in a step."""

from __future__ import annotations

import dataclasses
import enum

from models.decode import Drafter
from models.request_state import SavedState


class Phase(enum.Enum):
    """What a row of a step does. Told by the text, never by the window's shape: a prompt may be as long as a window."""

    PREFILL = "prefill"  # more of the text is known than the pools have absorbed
    DECODE = "decode"  # one known token, no drafts: a verify row of length 1
    VERIFY = "verify"


@dataclasses.dataclass(frozen=True)
class WindowRow:
    """One row of a step: known tokens (the first committed next, the others forced), then drafts."""

    tokens: bytes
    num_forced: int
    num_drafts: int  # of the step: forced tokens included
    complete: bool  # the known tokens end here, so what follows them is new text
    phase: Phase


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt to continue by at most ``max_new_tokens`` tokens, greedily; ``stop_token`` ends it early and is kept.

    The other fields are the engine's. ``text`` is the prompt and what came after it. ``committed`` tokens of it are in
    the pools: always fewer than the text has, for the last token's successor is still to be computed.
    """

    prompt: bytes
    max_new_tokens: int
    stop_token: int | None = None

    text: bytearray = dataclasses.field(init=False)
    committed: int = 0
    slot: int | None = None
    saved: SavedState | None = None
    finished: bool = False
    preemptions: int = 0
    restored_tokens: int = 0  # taken from the prefix cache, over all admissions
    row_steps: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt should have at least one token, got an empty one")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens should be at least 1, got {self.max_new_tokens}")
        self.text = bytearray(self.prompt)

    @property
    def continuation(self) -> bytes:
        return bytes(self.text[len(self.prompt) :])

    @property
    def wanted(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def next_window(self, size: int, drafter: Drafter, block_size: int | None) -> WindowRow:
        """The request's row in a step of ``size`` window tokens.

        With ``block_size`` the row ends at the next block boundary at the latest, so a request that passes a boundary
        stands exactly on it after some step, and its state there can be published.
        """
        limit = size if block_size is None else min(size, block_size - self.committed % block_size)
        known = bytes(self.text[self.committed : self.committed + limit])
        complete = self.committed + len(known) == len(self.text)
        room = min(limit - len(known), self.wanted - len(self.text) - 1) if complete else 0
        drafts = bytes(drafter(self.text, room)[:room]) if room > 0 else b""
        phase = Phase.VERIFY if drafts else Phase.DECODE
        if self.committed + 1 < len(self.text):
            phase = Phase.PREFILL
        forced = len(known) - 1
        return WindowRow(known + drafts, forced, forced + len(drafts), complete, phase)

    def advance(self, row: WindowRow, tokens: list[int], num_accepted: int) -> bytes:
        """Take a step's result for ``row``; returns the tokens that are new. The text is not cut at its end yet."""
        self.committed += num_accepted
        self.row_steps += 1
        # A chunk that is not the last of its text predicts a token that is known already.
        new = bytes(tokens[row.num_forced : num_accepted]) if row.complete else b""
        self.text += new
        return new

    def cut(self) -> bool:
        """Cut the text behind the stop token and after the wanted number of tokens; True if the request is done."""
        stop = -1 if self.stop_token is None else self.text.find(self.stop_token, len(self.prompt))
        end = self.wanted if stop < 0 else min(stop + 1, self.wanted)
        if len(self.text) < end:
            return False
        del self.text[end:]
        return True

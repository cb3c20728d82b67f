"""Drafts by prompt lookup: what followed the last occurrence of the text's own ending."""

from __future__ import annotations


def prompt_lookup(tokens: bytes | bytearray, num_drafts: int, *, max_ngram: int = 16, min_ngram: int = 3) -> bytes:
    """Up to ``num_drafts`` tokens that continue ``tokens``; possibly none.

    The longest suffix of ``max_ngram`` .. ``min_ngram`` tokens that occurs earlier decides, at its most recent earlier
    occurrence. A continuation that runs into the end of the text is shorter than asked for.
    """
    if num_drafts < 1 or min_ngram < 1:
        return b""
    end = len(tokens)
    best = -1
    for length in range(min_ngram, min(max_ngram, end - 1) + 1):
        # An occurrence of a longer suffix ends where one of every shorter suffix ends: the search only moves left.
        bound = end - 1 if best < 0 else best
        start = tokens.rfind(tokens[end - length :], 0, bound)
        if start < 0:
            break
        best = start + length
    return b"" if best < 0 else bytes(tokens[best : best + num_drafts])

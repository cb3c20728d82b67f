"""Prompt lookup against a brute-force statement of its rule."""

from hypothesis import given
from hypothesis import strategies as st

from models.drafting import prompt_lookup

# Few letters, so that repetitions are the rule.
TEXTS = st.lists(st.sampled_from(b"abc"), min_size=0, max_size=40).map(bytes)


def brute_force(tokens, num_drafts, max_ngram, min_ngram):
    for length in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == suffix:
                return tokens[end : end + num_drafts]
    return b""


@given(TEXTS, st.integers(0, 9), st.integers(1, 6), st.integers(0, 6))
def test_longest_suffix_then_most_recent(tokens, num_drafts, min_ngram, more):
    max_ngram = min_ngram + more
    drafted = prompt_lookup(tokens, num_drafts, max_ngram=max_ngram, min_ngram=min_ngram)
    assert drafted == (brute_force(tokens, num_drafts, max_ngram, min_ngram) if num_drafts else b"")


@given(TEXTS, st.integers(0, 9))
def test_drafts_are_a_piece_of_the_text_and_never_too_many(tokens, num_drafts):
    drafted = prompt_lookup(tokens, num_drafts)
    assert len(drafted) <= num_drafts
    assert drafted in tokens


def test_draft_counts_are_ragged():
    assert prompt_lookup(b"abcd.abc", 4) == b"d.ab"
    assert prompt_lookup(b"xabcabc", 4) == b"abc"  # runs into the end
    assert prompt_lookup(b"abcd", 4) == b""
    assert prompt_lookup(b"", 4) == b""
    assert prompt_lookup(b"a", 4, min_ngram=1) == b""
    assert prompt_lookup(b"aaaa", 2) == b"a"


def test_longer_match_beats_more_recent():
    assert prompt_lookup(b"1234X.234Y.1234", 1) == b"X"
    assert prompt_lookup(b"1234X.234Y.9234", 1) == b"Y"


def test_accepts_a_growing_bytearray():
    text = bytearray(b"hello, hel")
    assert prompt_lookup(text, 3) == b"lo,"
    assert isinstance(prompt_lookup(text, 3), bytes)

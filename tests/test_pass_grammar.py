"""Any combination of the grammar's choices is rewritten and equal; any look-alike of the corpora is left alone.

``covering_sample`` meets pairs of choices; here Hypothesis draws whole spellings, and looks for small ones where one fails.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from near_misses import check_left_alone
from spellings import CHOICES, Spelling, possible
from test_pass_near_misses_exits import CORPUS as EXITS
from test_pass_near_misses_steps import CORPUS as STEPS
from test_pass_spellings import check

SLOW = {"T": st.sampled_from((2, 3)), "layers": st.just(1)}
SPELLINGS = st.builds(
    Spelling, **{name: SLOW.get(name, st.sampled_from(choices)) for name, choices in CHOICES.items()}
).map(possible)
LOOK_ALIKES = st.sampled_from([*STEPS.values(), *EXITS.values()])
QUICK = dict(suppress_health_check=list(HealthCheck))
tried: dict[str, set] = {"rewritten": set(), "left alone": set()}


def rewritten_and_equal(spelling: Spelling) -> None:
    torch._dynamo.reset()
    check(spelling)
    tried["rewritten"].add(spelling)


def refused_and_untouched(case: tuple, dynamic: bool) -> None:
    check_left_alone(*case, dynamic)
    tried["left alone"].add((case, dynamic))


@settings(max_examples=14, **QUICK)
@given(SPELLINGS)
def test_b29_drawn_spelling_is_rewritten(spelling):
    rewritten_and_equal(spelling)


@settings(max_examples=8, **QUICK)
@given(LOOK_ALIKES, st.booleans())
def test_b29_drawn_look_alike_is_left_alone(case, dynamic):
    refused_and_untouched(case, dynamic)


@pytest.mark.exhaustive
@settings(max_examples=150, **QUICK)
@given(SPELLINGS)
def test_many_drawn_spellings_are_rewritten(spelling):
    rewritten_and_equal(spelling)


@pytest.mark.exhaustive
@settings(max_examples=40, **QUICK)
@given(LOOK_ALIKES, st.booleans())
def test_many_drawn_look_alikes_are_left_alone(case, dynamic):
    refused_and_untouched(case, dynamic)


def test_examples_were_tried(record_property):
    """Last in the file: strategies that filter everything away would pass without trying anything."""
    for what, models in tried.items():
        record_property(what, len(models))
    if tried["rewritten"]:  # not where this test was selected alone, or runs in another worker
        assert len(tried["rewritten"]) >= 10

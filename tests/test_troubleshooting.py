"""``docs/troubleshooting.md`` is true: its examples are refused for the reasons they stand under, and the cures cure."""

import re
from pathlib import Path

import pytest
import torch
from rewriting import DROPS_ROUND_TRIPS, copied, run_rewritten
from torch.utils import _pytree as pytree

from compile_passes import REASONS

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md").read_text()
BLOCK = re.compile(r"(?:(Refused|Rewritten):\n\n)?```python\n(.*?)```", re.DOTALL)
LAYER, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
SECTIONS = {section.split("\n", 1)[0].strip(): dict(BLOCK.findall(section)) for section in SECTIONS}
EXAMPLES = [(reason, kind) for reason, blocks in SECTIONS.items() for kind in blocks]
# Nothing that the reader can write differently would help.
WITHOUT_CURE = {"head_too_large"}


def run(code: str) -> dict:
    """The document's layer, with the functions of an example in the place of its own."""
    ((_, layer),) = BLOCK.findall(LAYER)
    namespace: dict = {}
    exec(layer, namespace)
    exec(code, namespace)
    return namespace


def test_every_reason_has_an_example():
    missing, unknown = set(REASONS) - set(SECTIONS), set(SECTIONS) - set(REASONS)
    assert not missing, f"docs/troubleshooting.md lacks a section for {sorted(missing)}"
    assert not unknown, (
        f"docs/troubleshooting.md explains {sorted(unknown)}, which compile_passes/matching/reasons.py does not know"
    )


@pytest.mark.parametrize("reason", SECTIONS)
def test_every_example_is_marked_and_comes_with_a_cure(reason):
    expected = {"Refused"} | (set() if reason in WITHOUT_CURE else {"Rewritten"})
    assert set(SECTIONS[reason]) == expected


@pytest.mark.parametrize(("reason", "kind"), EXAMPLES, ids=lambda x: x)
def test_example_does_what_the_text_says(reason, kind):
    example = run(SECTIONS[reason][kind])
    args = example["inputs"]()
    expected_args = copied(args)
    result, seen = run_rewritten(example["step"], *args)
    if (reason, kind) == ("rounded_between_steps", "Refused") and not seen.rounds:
        pytest.skip(DROPS_ROUND_TRIPS)
    reasons = {layer.reason for layer in seen.report.layers}
    assert reasons == ({reason} if kind == "Refused" else {None})
    expected = example["step"](*expected_args)
    for x, y in zip(*map(pytree.tree_leaves, ((result, args[0]), (expected, expected_args[0]))), strict=True):
        torch.testing.assert_close(x, y)


def test_the_layer_that_examples_change_is_rewritten():
    example = run("")
    assert run_rewritten(example["step"], *example["inputs"]())[1].report.matched == 1

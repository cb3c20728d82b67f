"""Every way to write a layer, in every family of linear attention: the second table of docs/pass.md."""

import pytest
from spellings import CHOICES, Spelling, possible
from test_pass_spellings import check

# What each changes in the generic model's layer, which is Kimi Delta Attention.
FAMILIES = {
    "gated delta rule": {"gate": "scalar"},
    "delta rule": {"gate": "none"},
    "gated linear attention": {"update": "none"},
    "Mamba-2": {"update": "none", "gate": "scalar"},
}
WAYS = (
    "contraction",
    "update",
    "layout",
    "stacking",
    "selection",
    "outputs",
    "projection",
    "l2norm",
    "beta",
    "checkpoint",
)


def choices(name: str) -> list[str]:
    """Those of a delta rule: an update without one is a family."""
    return [choice for choice in CHOICES[name] if (name, choice) != ("update", "none")]


def spellings() -> dict[str, Spelling]:
    """Of all rows, columns and shape modes; many rows are the default again."""
    found = [
        possible(Spelling(T=2, shapes=shapes, **family, **{name: choice}))
        for family in FAMILIES.values()
        for name in WAYS
        if name not in family
        for choice in choices(name)
        for shapes in CHOICES["shapes"]
    ]
    return {str(s): s for s in found}


def table() -> str:
    rows = ["| what | how it is written | " + " | ".join(FAMILIES) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    for name in WAYS:
        for choice in choices(name):
            forms = ("-" if name in f else Spelling(**f, **{name: choice}).form for f in FAMILIES.values())
            rows.append(f"| {name} | {choice} | " + " | ".join(forms) + " |")
    return "\n".join(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spelling", spellings().values(), ids=str)
def test_every_choice_of_every_family(spelling):
    check(spelling)

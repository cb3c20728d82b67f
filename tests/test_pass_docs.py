"""docs/pass.md says what the tests check: its tables are made from the grammar and from the reasons."""

from pathlib import Path

import test_pass_families
from spellings import CHOICES, Spelling
from test_pass_spellings import ALTERNATIVES
from test_pass_third_party import FORMS
from third_party import LAYOUTS, RECURRENT

from compile_passes import REASONS

TEXT = (Path(__file__).parents[1] / "docs" / "pass.md").read_text()


def spellings_table() -> str:
    """One row a choice; ``test_every_choice_in_every_shape_mode`` checks each of them in the three shape modes."""
    rows = ["| what | how it is written | static | dynamic batch | all dynamic |", "|---|---|---|---|---|"]
    for name in ALTERNATIVES:
        for choice in CHOICES[name]:
            form = Spelling(**{name: choice}).form
            batch = "-" if choice == "take_along_dim" else form  # torch fixes the batch there
            rows.append(f"| {name} | {choice} | {form} | {batch} | {form} |")
    return "\n".join(rows)


def third_party_table() -> str:
    """``test_recurrent_function_in_every_shape_mode`` checks each row in the three shape modes."""
    rows = ["| function | pool | static | dynamic batch | all dynamic |", "|---|---|---|---|---|"]
    for name, published in RECURRENT.items():
        for layout in LAYOUTS:
            form = FORMS[layout]
            rows.append(f"| `{published.module}.{name}` | {layout} | {form} | {form} | {form} |")
    return "\n".join(rows)


def reasons_table() -> str:
    rows = ["| reason | what was found; what to do |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{reason}` | {text} |" for reason, text in REASONS.items())])


def test_table_of_spellings_is_the_grammar():
    assert spellings_table() in TEXT


def test_table_of_families_is_the_grammar():
    assert test_pass_families.table() in TEXT


def test_table_of_third_party_functions_is_complete():
    assert third_party_table() in TEXT


def test_table_of_reasons_is_complete():
    assert reasons_table() in TEXT

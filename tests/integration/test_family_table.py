"""What docs/families.md says of families is what tests show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from edge_spec.exporters.families import BY_ARCHITECTURE, BY_MODEL_TYPE
from edge_spec.runtimes.llamacpp.hybrid import REWINDABLE
from fixtures import families
from fixtures.family_gguf import FORMS

ROOT = Path(__file__).parents[2]
FAMILIES = "test_families.py"


class Row(NamedTuple):
    """A line of the table; "-" where there is none."""

    name: str
    model_types: str
    architectures: str
    reference: str
    ort: str
    llamacpp: str
    test: str


def names(cell: str) -> set[str]:
    return set(cell.split(", ")) - {"-"}


def table() -> list[Row]:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| family | model_type | GGUF |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [Row(*line.strip("| ").split(" | ")) for line in lines]


def test_every_family_that_is_read_is_in_the_table_and_no_other() -> None:
    rows = table()
    assert {name for each in rows for name in names(each.model_types)} == set(BY_MODEL_TYPE)
    named = {name for each in rows for name in names(each.architectures)}
    assert named == {*BY_ARCHITECTURE, *REWINDABLE}


def test_the_tests_that_it_names_are_there() -> None:
    for each in table():
        for name in re.findall(r"test_\w+\.py", each.test):
            assert (ROOT / "tests" / "integration" / name).is_file(), name


def test_what_test_families_shows_has_fixtures() -> None:
    """Of transformers for the reference and ort, and as GGUF files for llama.cpp."""
    scored = {*map(families.model_type, families.NAMES), "gemma3"}  # the same as its text's
    as_gguf = {form.architecture for form in FORMS.values()}
    for each in table():
        if not each.test.startswith(FAMILIES):
            continue
        assert scored & names(each.model_types), each.name
        assert "-" not in (each.reference, each.ort)
        assert bool(as_gguf & names(each.architectures)) == (each.llamacpp != "-")

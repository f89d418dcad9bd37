"""What doctor and docs/models.md say of families is what tests show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from edge_spec.diagnostics.doctor.diagnose import examine
from edge_spec.diagnostics.doctor.families import FAMILIES, RUNTIMES, TABLE, markdown
from edge_spec.exporters.families import BY_ARCHITECTURE, BY_MODEL_TYPE
from edge_spec.runtimes.llamacpp.hybrid import REWINDABLE
from fixtures import families
from fixtures.family_gguf import FORMS

ROOT = Path(__file__).parents[2]


def test_every_family_that_is_read_is_in_the_table_and_no_other() -> None:
    assert {name for each in TABLE for name in each.model_types} == set(BY_MODEL_TYPE)
    named = {name for each in TABLE for name in each.architectures}
    assert named == {*BY_ARCHITECTURE, *REWINDABLE}


def test_the_tests_that_it_names_are_there() -> None:
    for each in TABLE:
        for name in re.findall(r"test_\w+\.py", each.test):
            assert (ROOT / "tests" / "integration" / name).is_file(), name


def test_what_test_families_shows_has_fixtures() -> None:
    """Of transformers for the reference and ort, and as GGUF files for llama.cpp."""
    scored = {*map(families.model_type, families.NAMES), "gemma3"}  # the same as its text's
    as_gguf = {form.architecture for form in FORMS.values()}
    for each in TABLE:
        if not each.test.startswith(FAMILIES):
            continue
        assert scored.intersection(each.model_types), each.name
        assert each.on("reference") and each.on("ort")
        assert bool(as_gguf.intersection(each.architectures)) == bool(each.on("llamacpp"))


def test_the_documentation_has_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_doctor_says_where_a_family_is_shown_to_run(
    hf: Callable[..., Path], tmp_path: Path
) -> None:
    def family_of(path: Path) -> str:
        _, found = examine(path, lambda what, done: None)
        (finding,) = (each for each in found if each.check == "family")
        return finding.found

    lfm2 = families.write_hf("lfm2", tmp_path / "lfm2")
    assert family_of(lfm2) == (
        "LFM2, dense, shown on reference (4.5e-6), ort (3.1e-6), llamacpp (3.6e-6, chains)"
    )
    assert all(place in family_of(hf()) for place in RUNTIMES[:4])

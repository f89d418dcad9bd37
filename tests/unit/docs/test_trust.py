"""The table of docs/results.md is made by its script from the record of the last runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results.md"


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("trust", ROOT / "benchmarks" / "trust.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "trust", module)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_made_from_the_record(trust: ModuleType) -> None:
    """Figures edited by hand, in the page or by forgetting to run the script, are found."""
    page = PAGE.read_text("utf-8")
    assert trust.with_table(page, trust.read_record()) == page


def test_no_promise_is_broken(trust: ModuleType) -> None:
    kept = trust.read_record()
    assert [name for name, each in kept.items() if not each["holds"]] == []


def test_pages_quote_one_speedup(trust: ModuleType) -> None:
    """README and docs/results.md say what benchmarks/results has."""
    assert {page.name for page in trust.figures.PAGES} == {"README.md", PAGE.name}
    for page, make in trust.figures.PAGES.items():
        text = page.read_text("utf-8")
        assert trust.figures.with_tables(text, make) == text, "run: benchmarks/figures.py"
    total = trust.figures.interval(trust.figures.read()["total"], "speedup")
    assert f"is {total} times as fast" in (ROOT / "README.md").read_text("utf-8")
    assert f"{total} times plain decoding" in PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match="lacks the comments"):
        trust.figures.with_tables("a page\n")


def test_what_a_row_names_exists(trust: ModuleType) -> None:
    for proof in trust.PROOFS.values():
        script = proof.command.split()[0]
        named = proof.held_by.split(", ") + ([script] if script != "-m" else [])
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_broken_promise_is_shown_as_broken(trust: ModuleType) -> None:
    found = {"rounds": 9, "kills": 8, "misloads": 1, "by_operation": {"export": 9}}
    kept = {"figures": trust.PROOFS["kills"].figures(found), "day": "2026-01-01", "commit": "abc"}
    kept |= {"cores": 2, "cpu": "A"}
    kept["holds"] = trust.PROOFS["kills"].holds(found)
    page = trust.with_table(PAGE.read_text("utf-8"), {"kills": kept})
    [row] = [line for line in page.splitlines() if "benchmarks/kills.py" in line]
    assert "**broken**: 8 kills in 9 rounds, 1 misloads (export)" in row
    assert "not measured" in next(
        line for line in page.splitlines() if "benchmarks/soak.py" in line
    )

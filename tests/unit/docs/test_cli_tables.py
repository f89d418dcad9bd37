"""The table of options in docs/cli.md is the one that their declaration makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MADE = runpy.run_path(str(ROOT / "docs/make_cli_tables.py"))


def test_the_table_of_the_page_is_up_to_date() -> None:
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    assert text == MADE["with_table"](text), "run: .venv/bin/python docs/make_cli_tables.py"


def test_what_stands_around_the_table_stays() -> None:
    page = f"before\n{MADE['BEGIN']}outdated\n{MADE['END']}after\n"
    made = MADE["with_table"](page)
    assert made.startswith("before\n") and made.endswith("after\n") and "outdated" not in made
    assert "| `--call-timeout SECONDS` | `call_timeout_s` |" in made


def test_a_page_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the comments"):
        MADE["with_table"]("a page\n")

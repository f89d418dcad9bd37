"""What is kept of how often a pair's draft tokens were accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from edge_spec.core.metrics import DraftRounds
from edge_spec.models.pair_history import PairHistory
from edge_spec.storage.json_store import write_sealed

ANY = TypeAdapter(Any)


def answer(right: int, wrong: int) -> DraftRounds:
    return DraftRounds(right + wrong, right)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pair.json"


def test_enough_rounds_are_known_in_the_next_process(path: Path) -> None:
    history = PairHistory(path)
    history.observe(answer(30, 30))
    assert history.first_acceptance() is None  # too few
    history.observe(answer(30, 30))
    assert history.first_acceptance() == 0.5
    history.save()
    assert PairHistory(path).first_acceptance() == 0.5
    assert PairHistory(path).first_draft_tokens == (120, 60)


@pytest.mark.parametrize("fields", [{"rounds": 1, "right": 2}, {"rounds": -1}, {"right": "ab"}])
def test_a_damaged_file_begins_anew(
    fields: dict[str, object], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sealed(path, ANY, {"version": 3} | fields)
    history = PairHistory(path)
    assert len(caplog.messages) == 1 and "made again" in caplog.text
    history.observe(answer(100, 100))
    history.save()
    assert PairHistory(path).first_acceptance() == 0.5


def test_what_two_processes_count_is_kept(path: Path) -> None:
    first, second = PairHistory(path), PairHistory(path)
    for history in (first, second, second):
        history.observe(answer(200, 50))
        history.save()
        history.save()  # once
    kept = json.loads(path.read_text())
    assert (kept["rounds"], kept["right"]) == (750, 600)
    assert second.first_draft_tokens == (750, 600)

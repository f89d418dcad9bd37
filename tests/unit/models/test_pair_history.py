"""What is kept of how often a pair's draft tokens were accepted."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from edge_spec.core.metrics import DraftRounds
from edge_spec.models.pair_history import MAX_ROUNDS, PairHistory
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


def test_of_long_use_the_recent_rounds_count(path: Path) -> None:
    history = PairHistory(path)
    for _ in range(100):
        history.observe(answer(400, 0))
    for _ in range(10):
        history.observe(answer(0, 400))
    rounds, right = history.first_draft_tokens
    assert rounds == MAX_ROUNDS and right < 0.1 * rounds


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


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_is_dropped_in_silence(
    version: int, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {"setup": {"rounds": 400, "right": 399}, "recent": {"rounds": 0, "right": 0}}
    write_sealed(path, ANY, {"version": version, "domains": {"chat": counts}})
    assert PairHistory(path).first_draft_tokens == (0, 0)
    assert caplog.messages == []


def test_what_two_processes_count_is_kept(path: Path) -> None:
    first, second = PairHistory(path), PairHistory(path)
    for history in (first, second, second):
        history.observe(answer(200, 50))
        history.save()
        history.save()  # once
    kept = json.loads(path.read_text())
    assert (kept["rounds"], kept["right"]) == (750, 600)
    assert second.first_draft_tokens == (750, 600)


def test_what_threads_count_is_what_one_would_have_counted(path: Path) -> None:
    together = PairHistory(path)

    def count(number: int) -> None:
        for _ in range(300):
            together.observe(DraftRounds(1, 1 if number % 2 else 0))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(count, range(2)))
    finally:
        sys.setswitchinterval(before)
    assert together.first_draft_tokens == (600, 300)


def test_what_is_known_of_a_pair_holds_for_a_day(path: Path) -> None:
    """Then it is tried again, once: what that finds is as new as the file."""
    first = PairHistory(path)
    first.observe(answer(right=20, wrong=380))
    first.save()
    written_s = path.stat().st_mtime

    def known_after(hours: float) -> float | None:
        return PairHistory(path, lambda: written_s + 3600 * hours).first_acceptance()

    assert [known_after(hours) for hours in (0, 23, 25)] == [0.05, 0.05, None]
    assert known_after(-1) is None  # the clock was set back
    os.utime(path, (written_s - 90_000, written_s - 90_000))
    tried = PairHistory(path)
    assert tried.first_acceptance() is None
    tried.observe(answer(right=0, wrong=2))
    tried.save()
    assert PairHistory(path).first_acceptance() == pytest.approx(20 / 402, abs=0.01)


def test_answers_without_the_draft_make_a_history_no_younger(path: Path) -> None:
    first = PairHistory(path)
    first.observe(answer(right=20, wrong=380))
    first.save()
    os.utime(path, (0, 0))
    rested = PairHistory(path)
    rested.observe(DraftRounds())
    rested.save()
    assert PairHistory(path).first_acceptance() is None


def test_what_cannot_be_saved_is_still_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    history = PairHistory(tmp_path / "file" / "pair.json")
    history.observe(answer(200, 50))
    history.save()
    assert history.first_draft_tokens == (250, 200)
    assert len(caplog.messages) == 1

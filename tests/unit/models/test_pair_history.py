"""A pair that has got worse is told apart from one that has only had bad luck."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from edge_spec.core.metrics import DraftRounds
from edge_spec.models.pair_history import SETUP_ROUNDS, PairHistory
from edge_spec.storage.json_store import write_sealed

ANY = TypeAdapter(Any)


def answer(right: int, wrong: int) -> DraftRounds:
    return DraftRounds(right + wrong, right)


def after(path: Path, before: float, now: float, rounds: int = 400) -> PairHistory:
    history = PairHistory(path)
    setup = round(before * SETUP_ROUNDS)
    history.observe("chat", answer(setup, SETUP_ROUNDS - setup))
    history.observe("chat", answer(round(now * rounds), rounds - round(now * rounds)))
    return history


@pytest.mark.parametrize(
    ("before", "now", "stale"),
    [(0.8, 0.8, False), (0.8, 0.9, False), (0.8, 0.74, False), (0.8, 0.68, True), (0.5, 0.3, True)],
)
def test_a_clear_drop_is_told(before: float, now: float, stale: bool, tmp_path: Path) -> None:
    line = after(tmp_path / "pair.json", before, now).staleness("chat")
    assert (line is not None) == stale
    if line is not None:
        assert f"{now:.0%}" in line and f"{before:.0%} when" in line


def test_a_pair_that_stays_as_it_is_is_rarely_called_stale(tmp_path: Path) -> None:
    """Three standard deviations: 1 in 700, and the rate is looked at 200 times."""
    random = np.random.default_rng(0)
    history = PairHistory(tmp_path / "pair.json")
    told = 0
    for _ in range(220):
        right = int(random.binomial(40, 0.7))
        history.observe("chat", answer(right, 40 - right))
        told += history.staleness("chat") is not None
    assert told <= 5


def test_without_enough_rounds_nothing_is_said(tmp_path: Path) -> None:
    few = after(tmp_path / "few.json", 0.9, 0.0, rounds=50)
    assert few.staleness("chat") is None and few.staleness("code") is None
    recent_alone = {"setup": {}, "recent": {"rounds": 200, "right": 1}}
    write_sealed(tmp_path / "pair.json", ANY, {"version": 2, "domains": {"chat": recent_alone}})
    assert PairHistory(tmp_path / "pair.json").findings() == []
    plain = PairHistory(tmp_path / "few.json" / "no-directory.json")
    plain.observe("chat", DraftRounds())  # an answer without draft tokens
    plain.save()
    assert plain.findings() == []


def test_it_recovers_when_the_draft_does(tmp_path: Path) -> None:
    history = after(tmp_path / "pair.json", 0.8, 0.4)
    assert history.staleness("chat") is not None
    for _ in range(10):
        history.observe("chat", answer(320, 80))
    assert history.staleness("chat") is None


def test_domains_are_counted_apart_and_survive_the_process(tmp_path: Path) -> None:
    history = after(tmp_path / "pair.json", 0.8, 0.3)
    history.observe("code", answer(400, 0))
    history.save()
    again = PairHistory(tmp_path / "pair.json")
    assert again.findings() == history.findings() != []
    assert again.staleness("code") is None


@pytest.mark.parametrize(
    "domain", [{"setup": {"rounds": 1, "right": 2}}, {"setup": "ab"}, {"recent": {"rounds": -1}}]
)
def test_a_damaged_file_begins_anew(
    domain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pair.json"
    write_sealed(path, ANY, {"version": 2, "domains": {"chat": domain}})
    history = after(path, 0.8, 0.3)
    assert len(caplog.messages) == 1 and "domains.chat" in caplog.text
    history.save()
    assert PairHistory(path).findings() == history.findings() != []


def test_what_was_counted_of_a_draft_alone_is_forgotten_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 1 counted what suffix lookup drafts now, so it would make any draft look stale."""
    path = tmp_path / "pair.json"
    counts = {"setup": {"rounds": 400, "right": 399}, "recent": {"rounds": 0, "right": 0}}
    write_sealed(path, ANY, {"version": 1, "domains": {"chat": counts}})
    history = after(path, 0.7, 0.7)
    assert (history.findings(), caplog.messages) == ([], [])


def test_what_two_processes_count_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    first, second = PairHistory(path), PairHistory(path)
    for history, domain in ((first, "chat"), (second, "code"), (second, "chat")):
        history.observe(domain, answer(200, 50))
        history.save()
    counts = {name: each["setup"] for name, each in json.loads(path.read_text())["domains"].items()}
    assert counts["chat"] == {"rounds": 500.0, "right": 400.0}
    assert counts["code"] == {"rounds": 250.0, "right": 200.0}


def test_what_another_process_has_learnt_of_late_outweighs_no_long_use(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    after(path, 0.8, 0.8).save()
    first, second = PairHistory(path), PairHistory(path)
    first.observe("chat", answer(3, 1))
    for _ in range(100):
        second.observe("chat", answer(300, 100))
    first.save()
    second.save()
    recent = json.loads(path.read_text())["domains"]["chat"]["recent"]
    assert 800 <= recent["rounds"] <= 1300


def test_what_threads_count_is_what_one_would_have_counted(tmp_path: Path) -> None:
    """Old rounds count half now and then, which takes several steps."""
    together, alone = (PairHistory(tmp_path / name) for name in ("together.json", "alone.json"))
    for history in (together, alone):
        history.observe("any", answer(SETUP_ROUNDS, 0))

    def count(history: PairHistory) -> None:
        for _ in range(3000):
            history.observe("any", answer(100, 1))

    for _ in range(8):
        count(alone)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(count, [together] * 8))
    finally:
        sys.setswitchinterval(before)
    for history in (together, alone):
        history.save()
    kept = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("together", "alone")]
    assert kept[0] == kept[1]


def test_what_is_known_of_a_pair_is_what_it_did_of_late(tmp_path: Path) -> None:
    history = PairHistory(tmp_path / "pair.json")
    history.observe("any", answer(30, 30))
    assert history.first_acceptance() is None  # too few
    history.observe("any", answer(30, 30))
    assert history.first_acceptance() == 0.5
    assert after(tmp_path / "other.json", 0.5, 0.75).first_acceptance() == pytest.approx(0.75, 0.05)


def test_what_is_known_of_a_pair_holds_for_a_day(tmp_path: Path) -> None:
    """Then it is tried again, once: what that finds is as new as the file."""
    path = tmp_path / "pair.json"
    first = PairHistory(path)
    first.observe("any", answer(right=20, wrong=380))
    first.save()
    written_s = path.stat().st_mtime

    def known_after(hours: float) -> float | None:
        return PairHistory(path, lambda: written_s + 3600 * hours).first_acceptance()

    assert [known_after(hours) for hours in (0, 23, 25)] == [0.05, 0.05, None]
    assert known_after(-1) is None  # the clock was set back
    os.utime(path, (written_s - 90_000, written_s - 90_000))
    tried = PairHistory(path)
    assert tried.first_acceptance() is None
    tried.observe("any", answer(right=0, wrong=2))
    tried.save()
    assert PairHistory(path).first_acceptance() == pytest.approx(20 / 402, abs=0.05)


def test_answers_without_the_draft_make_a_history_no_younger(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    first = PairHistory(path)
    first.observe("any", answer(right=20, wrong=380))
    first.save()
    os.utime(path, (0, 0))
    rested = PairHistory(path)
    rested.observe("any", answer(right=0, wrong=0))
    rested.save()
    assert PairHistory(path).first_acceptance() is None

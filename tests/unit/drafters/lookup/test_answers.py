"""Earlier answers: against a plain list, after damage, where nothing can be written, and twice."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup import answers as kept_answers
from edge_spec.drafters.lookup.answers import AnswersDrafter, KeptAnswers
from edge_spec.storage import measurements
from edge_spec.text.vocabulary import Vocabulary
from fixtures.corpora import documents_of

VOCABULARY = Vocabulary("a" * 64, 50)
OUT = Forward(np.zeros((1, 1), np.float32))

answered = st.one_of(
    st.sampled_from([[1, 2], [2, 3], [0, 1, 2, 3, 1, 1]]),  # often once more
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers" / "tiny-abc.json"


@pytest.fixture(autouse=True)
def told_again() -> Iterator[None]:
    """What cannot be saved is said once in a process."""
    measurements._tell_once.cache_clear()
    yield
    measurements._tell_once.cache_clear()


def opened(path: Path, **options: Any) -> KeptAnswers:
    return KeptAnswers(path, VOCABULARY, **options)


def texts(answers: KeptAnswers) -> list[list[int]]:
    return [text for index in answers.indexes for text in documents_of(index)]


def add(answers: KeptAnswers, *tokens: int) -> None:
    answers.add(tokens, answers.num_forgotten)


def write(drafter: AnswersDrafter, *tokens: int) -> None:
    drafter.observe(TokenTree.chain(0), OUT, Verdict(tokens, (), True))


def newest(texts: list[list[int]], room: int) -> list[list[int]]:
    """Each takes one more than its tokens."""
    while sum(len(text) + 1 for text in texts) > room:
        texts = texts[1:]
    return texts


@given(
    steps=st.lists(st.one_of(*[answered] * 4, st.just("reopen")), max_size=25),
    room=st.integers(16, 40),
    keeps=st.booleans(),
)
def test_answers_are_a_list_of_bounded_length(steps: list[Any], room: int, keeps: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_answers, "MAX_TOKENS", room)
        patch.setattr(kept_answers, "MAX_NEW_TOKENS", 12)
        path = Path(folder) / "answers" / "tiny.json"
        answers, old, new = opened(path, keeps=keeps), [], []  # type: ignore[var-annotated]
        for step in [*steps, "reopen"]:
            if step == "reopen":
                answers = opened(path, keeps=keeps)
                old, new = newest(old + (new if keeps else []), room), []
            elif step not in old + new:
                new.append(step)
                if sum(map(len, new)) > 12:
                    old, new = (newest(old + new, room), []) if keeps else (old, newest(new, 12))
            if step != "reopen":
                add(answers, *step)
            assert texts(answers) == old + new
        assert path.exists() is bool(old)


def test_an_answer_is_kept_with_the_end_of_its_prompt_and_nothing_of_the_rest(path: Path) -> None:
    answers = opened(path)
    drafter = AnswersDrafter(answers)
    drafter.begin([7, 7, 1, 2, 3])
    write(drafter, 4)
    write(drafter, 5)
    assert not path.exists()
    drafter.begin([9])
    write(drafter, 6)  # this one is being written
    assert texts(answers) == texts(opened(path)) == [[1, 2, 3, 4, 5]]
    drafter.close()
    drafter.close()
    assert texts(opened(path)) == [[1, 2, 3, 4, 5], [9, 6]]


def test_the_file_is_private(path: Path) -> None:
    add(opened(path), 4)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


# Damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: b"", "no answers in the tokens"),
        (lambda raw: b"\xff" + raw, "no answers in the tokens"),
        (lambda raw: raw.replace(b"a" * 64, b"b" * 64), "no answers in the tokens"),
        (lambda raw: raw + bytes(4_000_000), "more than"),
    ],
)
def test_a_damaged_file_starts_again_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Any, why: str
) -> None:
    add(opened(path), 1, 4)
    path.write_bytes(damage(path.read_bytes()))
    answers = opened(path)
    assert texts(answers) == []
    add(answers, 1, 5)
    assert texts(answers) == texts(opened(path)) == [[1, 5]]
    [line] = caplog.messages
    assert str(path) in line and "start again" in line and why in line and "\n" not in line


@pytest.mark.parametrize(
    "line", [b"[1, 50]", b"[-1]", b"[", b"{}", b"\xff", b"[]", b"[1.5]", b"[2"]
)
def test_a_damaged_line_is_passed_over(path: Path, line: bytes) -> None:
    add(opened(path), 1, 4)
    with path.open("ab") as file:
        file.write(b"\n" + line)  # and then the process was killed
    answers = opened(path)
    add(answers, 1, 5)
    assert texts(answers) == [[1, 4], [1, 5]]
    assert sorted(texts(opened(path))) == [[1, 4], [1, 5]]


# What cannot be written


def test_a_file_that_cannot_be_read_is_not_overwritten(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    answers = opened(path)
    for token in (2, 3):
        add(answers, 1, token)
        assert path.is_dir()
    first, second = caplog.messages
    assert "cannot read" in first and "cannot be saved" in second
    assert texts(answers) == [[1, 2], [1, 3]]


def test_what_cannot_be_saved_drafts_until_the_process_ends(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(opened(path), 1, 4)
    before = path.read_bytes()
    answers = opened(path)
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda file, line: write(file, line[:5]))  # the disk is full
        for token in (5, 6):
            add(answers, 1, token)
    assert path.read_bytes() == before
    [line] = caplog.messages
    assert "cannot be saved" in line
    add(answers, 1, 7)
    assert texts(answers) == [[1, 4], [1, 5], [1, 6], [1, 7]]
    assert texts(opened(path)) == [[1, 4], [1, 7]]


# Several at once


def test_what_others_saved_is_used_when_the_file_is_read_again(path: Path) -> None:
    one, other = opened(path), opened(path)
    add(one, 1, 10)
    add(other, 1, 11)
    assert texts(one) == [[1, 10]] and texts(other) == [[1, 11]]
    assert texts(opened(path)) == [[1, 10], [1, 11]]


def test_what_was_written_before_the_file_was_forgotten_does_not_come_back(path: Path) -> None:
    answers = opened(path)
    drafters = [AnswersDrafter(answers) for _ in range(3)]
    add(answers, 1, 4)
    for drafter in drafters:
        drafter.begin([1])
        write(drafter, 6)
    kept_answers.forget(path)
    drafters[0].begin([1])
    write(drafters[0], 7)
    for drafter in drafters[1:]:
        drafter.close()
    assert not path.exists()
    drafters[0].close()
    assert texts(opened(path)) == texts(answers) == [[1, 7]]


def test_while_another_process_writes_an_answer_stays_in_memory(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "LOCK_TIMEOUT_S", 0.01)
    add(opened(path), 1, 4)
    answers = opened(path)
    with FileLock(f"{path}.lock"):
        add(answers, 1, 5)
    assert len(caplog.messages) == 1
    add(answers, 1, 6)
    assert texts(answers) == [[1, 4], [1, 5], [1, 6]]
    assert texts(opened(path)) == [[1, 4], [1, 6]]


# The drafter


def test_a_second_session_has_more_draft_tokens_right(
    path: Path, decode: Any, greedy: Any, scripted: Any
) -> None:
    script = np.random.default_rng(3).integers(0, 50, 60).tolist()
    model, right = scripted(3, script, vocab_size=50), []
    for _ in range(2):
        drafter = AnswersDrafter(opened(path))
        run = decode(model, [1, 2, 3], [drafter], max_tokens=60)
        assert run.tokens == greedy(model, [1, 2, 3], 60) == script
        right.append(sum(token.drafter == "answers" for token in run.decoded))
        drafter.close()
    assert right[0] == 0 and right[1] > 25

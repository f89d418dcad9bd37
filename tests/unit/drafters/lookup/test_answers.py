"""Earlier answers: against a plain list, after damage, where nothing can be written, and twice."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import example, given
from hypothesis import strategies as st

from edge_spec.drafters.lookup import answers as kept_answers
from edge_spec.drafters.lookup.answers import SAVE_AFTER_S, CorpusDrafter, KeptAnswers
from edge_spec.storage import measurements
from edge_spec.storage.atomic import atomic_file
from edge_spec.text.vocabulary import Vocabulary
from fixtures.corpora import documents_of

VOCABULARY = Vocabulary("a" * 64, 50)
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
CONTEXT = 3  # tokens of a prompt

answered = st.one_of(
    st.sampled_from([([1], [2]), ([2], [3]), ([0, 1, 2, 3], [1, 1])]),  # often once more
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.lists(st.integers(0, 3), max_size=6),
    ),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def answer(answers: KeptAnswers, prompt: list[int], *tokens: int) -> None:
    """Writes an answer and ends it."""
    answers.begin(prompt)
    answers.extend(tokens)
    answers.begin([0])


def saved(path: Path, *tokens: int) -> None:
    answers = opened(path)
    answer(answers, [1, 2, 3], *tokens)
    assert answers.save()


def once(texts: list[list[int]]) -> list[list[int]]:
    """The last of equal ones."""
    return [text for at, text in enumerate(texts) if text not in texts[at + 1 :]]


def newest(texts: list[list[int]], room: int) -> list[list[int]]:
    """Each takes one more than its tokens."""
    while len(texts) > 1 and sum(len(text) + 1 for text in texts) > room:
        texts = texts[1:]
    return [text[-(room - 1) :] for text in texts]


@given(
    steps=st.lists(
        st.one_of(*[answered] * 4, st.sampled_from(["save", "reopen", "close"])), max_size=25
    ),
    room=st.integers(9, 40),
    keeps=st.booleans(),
)
@example(
    steps=[([1], [2]), ([2], [3]), "save", ([1], [2]), ([2], [3]), ([1], [2])],
    room=40,
    keeps=True,
)
def test_answers_are_a_list_of_bounded_length(steps: list[Any], room: int, keeps: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_answers, "MAX_TOKENS", room)
        patch.setattr(kept_answers, "MAX_UNSAVED_TOKENS", 8)
        path = Path(folder) / "answers" / "tiny.json"
        answers, kept, new = opened(path, keeps=keeps), [], []  # type: ignore[var-annotated]
        for step in [*steps, "close", "reopen"]:
            if step == "reopen":
                answers, new = opened(path, keeps=keeps), []
            elif step in ("save", "close"):
                done = getattr(answers, step)()
                assert done is (None if step == "close" else keeps or not new)
                if keeps and new:
                    kept, new = newest(once(kept + new), room), []
            else:
                prompt, tokens = step
                answer(answers, prompt, *tokens)
                if tokens:
                    new = newest(once([*new, prompt[-CONTEXT:] + tokens]), 8)
            assert texts(answers) == kept + new
        assert path.exists() is bool(kept)


def test_an_answer_is_found_with_the_end_of_its_prompt_and_nothing_of_the_rest(path: Path) -> None:
    answers = opened(path)
    answer(answers, [7, 7, 1, 2, 3], 4, 5)
    answers.begin([9])
    answers.extend([6])  # this one is being written
    assert texts(answers) == [[1, 2, 3, 4, 5]] and not path.exists()
    answers.close()
    assert texts(opened(path)) == [[1, 2, 3, 4, 5], [9, 6]]


def test_the_file_is_private_and_that_of_before_is_removed(path: Path) -> None:
    before = path.with_suffix(".corpus")
    before.parent.mkdir(mode=0o700)
    before.write_bytes(b"\x93ECORPUS")
    saved(path, 4)
    assert not before.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


# Damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda raw: raw[: len(raw) // 2], "sha256 differs"),
        (lambda raw: raw[:-1] + b"\1", "sha256 differs"),
        (lambda raw: b"", "no sha256"),
        (lambda raw: raw.replace(b"a" * 64, b"b" * 64), "sha256 differs"),
        (lambda raw: raw + bytes(4_000_000), "more than"),
    ],
)
def test_a_damaged_file_starts_again_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, damage: Any, why: str
) -> None:
    saved(path, 4)
    path.write_bytes(damage(path.read_bytes()))
    answers = opened(path)
    assert texts(answers) == []
    answer(answers, [1], 5)
    assert answers.save()
    assert texts(answers) == texts(opened(path)) == [[1, 5]]
    [line] = caplog.messages
    assert str(path) in line and "start again" in line and why in line and "\n" not in line


# What cannot be written


def test_a_file_that_cannot_be_read_is_not_overwritten(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    answers = opened(path)
    for token in (2, 3):
        answer(answers, [1], token)
        assert not answers.save() and path.is_dir()
    first, second = caplog.messages
    assert "cannot read" in first and "cannot be saved" in second
    assert texts(answers) == [[1, 2], [1, 3]]


@pytest.mark.parametrize("moment", ["opening", "renaming", "late"])
def test_a_failed_write_leaves_the_old_file_and_loses_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    saved(path, 4)
    before = path.read_bytes()

    @contextmanager
    def full_disk(final: Path, mode: int) -> Iterator[Any]:
        if moment == "opening":
            raise NO_SPACE
        with atomic_file(final, mode) as work:
            yield work
            if moment == "renaming":
                raise NO_SPACE
        raise NO_SPACE  # the directory cannot be synced

    answers = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "atomic_file", full_disk)
        for token in (5, 6):
            answer(answers, [1], token)
            assert not answers.save()
    assert (path.read_bytes() == before) is (moment != "late")
    assert len(caplog.messages) == 1 and "no space left" in caplog.text.lower()
    assert texts(answers) == [[1, 2, 3, 4], [1, 5], [1, 6]]
    assert answers.save()
    assert texts(opened(path)) == [[1, 2, 3, 4], [1, 5], [1, 6]]  # each once
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


# Several at once


def test_what_others_saved_is_kept_and_used_from_then_on(path: Path) -> None:
    one, other = opened(path), opened(path)
    for number, answers in enumerate((one, other)):
        answer(answers, [1], 10 + number)
        assert answers.save()
    assert texts(other) == texts(opened(path)) == [[1, 10], [1, 11]]
    assert texts(one) == [[1, 10]]
    answer(one, [1], 12)
    assert one.save()
    assert texts(one) == [[1, 10], [1, 11], [1, 12]]


def test_what_was_written_before_the_file_was_forgotten_does_not_come_back(path: Path) -> None:
    clock = Clock()
    answers = opened(path, clock=clock)
    others = [answers.beside(), answers.beside()]
    answer(answers, [1], 4)
    assert answers.save()
    answer(answers, [1], 5)
    for other in others:
        other.begin([1])
        other.extend([6])
    kept_answers.forget(path)
    clock.now += SAVE_AFTER_S + 1
    answers.begin([1])
    assert not path.exists()
    answers.extend([7])
    for other in others:
        other.close()
    assert not path.exists()
    answers.close()
    assert texts(opened(path)) == texts(others[0]) == [[1, 7]]


def test_while_another_process_saves_new_answers_wait(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_answers, "LOCK_TIMEOUT_S", 0.01)
    saved(path, 4)
    answers = opened(path)
    with FileLock(f"{path}.lock"):
        for token in (5, 6):
            answer(answers, [1], token)
            assert not answers.save()
    [line] = caplog.messages
    assert "another process saves" in line
    assert answers.save()
    assert texts(opened(path)) == [[1, 2, 3, 4], [1, 5], [1, 6]]


# The drafter


def test_a_second_session_has_more_draft_tokens_right(
    path: Path, decode: Any, greedy: Any, scripted: Any
) -> None:
    script = np.random.default_rng(3).integers(0, 50, 60).tolist()
    model, right = scripted(3, script, vocab_size=50), []
    for _ in range(2):
        drafter = CorpusDrafter(answers=opened(path), name="answers")
        run = decode(model, [1, 2, 3], [drafter], max_tokens=60)
        assert run.tokens == greedy(model, [1, 2, 3], 60) == script
        right.append(sum(token.drafter == "answers" for token in run.decoded))
        drafter.close()
    assert right[0] == 0 and right[1] > 25

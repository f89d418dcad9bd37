"""Texts are for the user's eyes alone, within a bound, and a damaged one is left out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from edge_spec.distill.tensor_file import write_tensors
from edge_spec.learning.texts import LearntText, TextFiles, as_kept
from edge_spec.testing.scripted import smallest_config

HIDDEN, VOCAB = 1, 50  # of the smallest model there is
TARGET = smallest_config("scripted", VOCAB, 100)


def text(count: int = 10, seed: int = 0) -> LearntText:
    random = np.random.default_rng(seed)
    states = as_kept(random.normal(size=(count, HIDDEN)))
    return LearntText((1, 2, 3), random.integers(0, VOCAB, count), states)


@pytest.fixture
def files(tmp_path: Path) -> TextFiles:
    return TextFiles(tmp_path / "texts")


def test_what_is_kept_comes_back_in_its_order(files: TextFiles) -> None:
    written = [text(10, 0), text(12, 1)]
    for each in written:
        files.add(each)
    assert [tuple(each) for each in files.entries()] == [(0, 10), (1, 12)]
    for found, expected in zip(files.read(files.entries(), TARGET), written, strict=True):
        assert found.prompt == expected.prompt
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.states, expected.states)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_nobody_else_can_read_it(files: TextFiles) -> None:
    files.add(text())
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files.directory.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700


def test_the_oldest_go_beyond_the_bound(tmp_path: Path) -> None:
    files = TextFiles(tmp_path / "texts")
    files.add(text())
    bounded = TextFiles(tmp_path / "texts", max_bytes=int(3.5 * files.num_bytes()))
    for seed in range(5):
        bounded.add(text(seed=seed))
    assert [each.number for each in bounded.entries()] == [3, 4, 5]
    assert bounded.num_bytes() <= 3.5 * files.num_bytes()


def test_a_text_larger_than_the_bound_is_the_only_one(tmp_path: Path) -> None:
    files = TextFiles(tmp_path / "texts", max_bytes=10)
    files.add(text())
    files.add(text())
    assert [each.number for each in files.entries()] == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": np.array([VOCAB], np.int64)},
        {"tokens": np.array([-1], np.int64)},
        {"tokens": np.array([], np.int64), "states": np.zeros((0, HIDDEN), np.float16)},
        {"states": np.zeros((1, HIDDEN + 1), np.float16)},
        {"states": np.full((1, HIDDEN), np.nan, np.float16)},
        {"states": np.zeros((1, HIDDEN), np.float32)},
    ],
)
def test_one_that_cannot_be_of_this_target_is_removed_and_told(
    wrong: dict[str, np.ndarray], files: TextFiles, caplog: pytest.LogCaptureFixture
) -> None:
    files.add(text(1))
    path = files.directory / "00000000-1.text"
    whole = {
        "prompt": np.array([1], np.int64),
        "tokens": np.array([2], np.int64),
        "states": np.zeros((1, HIDDEN), np.float16),
    }
    write_tensors(path, whole)
    assert len(list(files.read(files.entries(), TARGET))) == 1
    write_tensors(path, whole | wrong)
    assert list(files.read(files.entries(), TARGET)) == []
    assert "damaged" in caplog.text and not path.exists()


@pytest.mark.parametrize("count", [0, 7, 40, -1])
def test_one_that_was_cut_off_is_left_out_and_the_others_are_read(
    count: int, files: TextFiles
) -> None:
    files.add(text())
    files.add(text(12))
    path = files.directory / "00000000-10.text"
    path.write_bytes(path.read_bytes()[:count])
    assert [len(each.tokens) for each in files.read(files.entries(), TARGET)] == [12]

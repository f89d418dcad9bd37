"""Unfinished work is kept where it can be gone on with, and removed where nobody can."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.distill.run import KEPT_DAYS, forget_training, work_folder
from edge_spec.errors import UsageError

SOURCE: Any = SimpleNamespace(identity="0", name="model")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    return tmp_path / "distill"


def _answered(folder: Path) -> None:
    (folder / "answers.jsonl").write_bytes(b"answers")


def test_folders_that_nobody_goes_on_with_go() -> None:
    with work_folder(SOURCE, "old") as old, work_folder(SOURCE, "new") as new:
        _answered(old)
        _answered(new)
    ago = time.time() - (KEPT_DAYS + 1) * 86400
    os.utime(old, (ago, ago))
    with work_folder(SOURCE, "third"):
        assert not old.exists() and new.exists()


def test_one_that_another_process_works_in_stays() -> None:
    with work_folder(SOURCE, "old") as old:
        ago = time.time() - (KEPT_DAYS + 1) * 86400
        os.utime(old, (ago, ago))
        with work_folder(SOURCE, "new"):
            assert old.exists()
        with pytest.raises(UsageError, match="another process trains"), work_folder(SOURCE, "old"):
            pass


def test_answers_outlive_a_training() -> None:
    with work_folder(SOURCE, "tasks") as folder:
        _answered(folder)
        (folder / "training-1.npz").touch()
        (folder / "distilled-1").mkdir()
        (folder / "distilled-1" / "answers.jsonl").touch()
        forget_training(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["answers.jsonl"]

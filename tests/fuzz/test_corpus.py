"""Stored hostile inputs, and mutations of them, end in an error of ours or in nothing.

benchmarks/fuzz.py looks for more, and puts what it finds into the corpus.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
NAMES = sorted(path.name for path in (FOLDER / "corpus").iterdir() if path.is_dir())
MAX_CORPUS_BYTES = 400_000
MUTATIONS = 100


@cache
def replayed(mutations: int) -> dict[str, dict[str, Any]]:
    # In a process of its own: a library that aborts takes it along, and so does its memory bound.
    done = subprocess.run(
        [sys.executable, str(FOLDER / "replay.py"), str(mutations), *NAMES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["name"]: result for result in results}


@pytest.mark.parametrize("mutations", [0, pytest.param(MUTATIONS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_hostile_input_ends_in_an_error_of_ours(name: str, mutations: int) -> None:
    result = replayed(mutations)[name]
    assert result["found"] == ""
    stored = len(list((FOLDER / "corpus" / name).iterdir()))
    assert result["inputs"] == mutations + stored


def test_the_corpus_is_small_and_named_by_content() -> None:
    files = [path for path in (FOLDER / "corpus").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_CORPUS_BYTES
    for path in files:
        assert path.name == hashlib.sha256(path.read_bytes()).hexdigest()[:16], path

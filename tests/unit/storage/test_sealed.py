"""Sealed JSON: what is not what was written is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from edge_spec.storage import measurements
from edge_spec.storage.measurements import DamagedError, read_sealed, tell_unkept, write_sealed

KIND = TypeAdapter(dict[str, Any])
CONTENT = {"version": 1, "values": [0.1, 1e-300, "ü\n"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sealed(tmp_path / "kept.json", KIND, CONTENT)
    return tmp_path / "kept.json"


def test_a_sealed_file_is_json_and_is_read_as_it_was_written(path: Path) -> None:
    assert read_sealed(path, KIND) == CONTENT
    assert {**CONTENT, "sha256": json.loads(path.read_text())["sha256"]} == json.loads(
        path.read_text()
    )


def test_no_changed_byte_goes_unnoticed(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            read_sealed(path, KIND)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(DamagedError):
            read_sealed(path, KIND)


def test_what_a_person_wrote_needs_no_seal_where_none_is_required(path: Path) -> None:
    path.write_text(json.dumps(CONTENT))
    assert read_sealed(path, KIND, required=False) == CONTENT
    with pytest.raises(DamagedError, match="no sha256"):
        read_sealed(path, KIND)


def test_a_file_is_not_read_beyond_its_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MAX_BYTES", path.stat().st_size)
    assert read_sealed(path, KIND) == CONTENT
    monkeypatch.setattr(measurements, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(DamagedError, match="more than"):
        read_sealed(path, KIND)


def test_a_cache_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    for name in ("plans/a.json", "measurements/b.sqlite", "answers/c.json"):
        tell_unkept(tmp_path / name, OSError(30, "Read-only file system", name))
    assert len(caplog.messages) == 1 and str(tmp_path) in caplog.text

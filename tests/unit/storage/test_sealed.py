"""Sealed JSON: what is not what was written is not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_spec.storage.measurements import DamagedError, seal, tell_unkept, unseal

CONTENT = json.dumps({"version": 1, "values": [0.1, 1e-300, "ü\n"]}).encode()


def test_sealed_json_is_json_and_is_read_as_it_was_written() -> None:
    sealed = seal(CONTENT)
    assert unseal(sealed) == CONTENT
    document = json.loads(sealed)
    assert len(document.pop("sha256")) == 64 and document == json.loads(CONTENT)


def test_no_changed_byte_goes_unnoticed() -> None:
    whole = seal(CONTENT)
    for at in range(len(whole)):
        with pytest.raises(DamagedError):
            unseal(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for end in range(len(whole)):
        with pytest.raises(DamagedError):
            unseal(whole[:end])


def test_a_cache_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    for name in ("plans/a.json", "measurements/b.sqlite", "answers/c.json"):
        tell_unkept(tmp_path / name, OSError(30, "Read-only file system", name))
    assert len(caplog.messages) == 1 and str(tmp_path) in caplog.text

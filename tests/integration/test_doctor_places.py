"""`edge-spec doctor` says where a model runs, from its headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_spec.diagnostics.doctor.model import check_runtimes
from edge_spec.models import runtimes
from edge_spec.models.source import Source
from fixtures import families

NAMES = ["ort", "llamacpp", "reference"]


def told(path: Path) -> list[tuple[str, str]]:
    found = check_runtimes(Source(str(path), lambda what, done: None))
    return [(str(finding.level), finding.found) for finding in found]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever libraries this machine has beside these."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(runtimes, "known_runtimes", lambda: NAMES)
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


def test_what_a_writer_does_not_write_is_named_before_it_is_tried(tmp_path: Path) -> None:
    directory = families.write_hf("gpt-oss", tmp_path / "model")
    can, cannot = told(directory)
    assert can == ("ok", "runs on ort, reference")
    assert cannot[0] == "note" and cannot[1].startswith("not on llamacpp: ")
    assert "does not write its" in cannot[1] and "attention sinks" in cannot[1]


def test_a_family_that_nothing_knows_runs_nowhere(tmp_path: Path) -> None:
    directory = families.write_hf("granite", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "mystery"}))
    found = told(directory)
    assert [level for level, _ in found] == ["note"] * len(NAMES)
    assert all("mystery" in reason or "optimum" in reason for _, reason in found)

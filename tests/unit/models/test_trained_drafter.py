"""Of the drafters that were trained for a model, the one that is forecast to pay most is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_spec.models.draft_choice import place_of, trained_drafter
from edge_spec.models.source import Source


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"weights")
    return Source(str(tmp_path / "model.gguf"), lambda what, fraction: None)


def keep(source: Source, kind: str, report: Any) -> Path:
    path = place_of(source, kind)
    path.mkdir(parents=True)
    (path / "report.json").write_text(report if isinstance(report, str) else json.dumps(report))
    return path


def pays(speedup: object, pays: object = True) -> dict[str, Any]:
    return {"pays": pays, "forecast": {"speedup": speedup}}


def test_the_one_that_pays_most_is_found(source: Source, tmp_path: Path) -> None:
    assert trained_drafter(source) is None
    keep(source, "medusa", pays(1.2))
    best = keep(source, "eagle3", pays(1.7))
    keep(source, "draft", pays(9.0, pays=False))
    assert trained_drafter(source) == best
    (tmp_path / "other.gguf").write_bytes(b"weights of another model")
    assert trained_drafter(Source(str(tmp_path / "other.gguf"), source.progress)) is None


@pytest.mark.parametrize(
    "report",
    [
        *("", "[" * 100_000, "[]", '{"pays": true}', '{"pays": true, "forecast": 3}'),
        *(pays("much"), pays(None), pays(1.5, pays="yes"), pays(float("nan")), pays(0.5)),
    ],
)
def test_a_report_that_says_nothing_of_use_is_passed_over(source: Source, report: Any) -> None:
    keep(source, "medusa", report)
    assert trained_drafter(source) is None

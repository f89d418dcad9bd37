"""A draft in its cheapest form: a copy in 4 bits with scores of common tokens, made once and kept;
texts are plain decoding's, and whatever stands in the way leaves the draft as it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_spec import SamplingParams, load
from edge_spec.engine.engine import Engine
from edge_spec.errors import ExportError
from edge_spec.exporters.gguf.export import GgufExporter
from edge_spec.models import draft_choice as draft_form
from edge_spec.runtimes.llamacpp import upstream
from edge_spec.storage.atomic import cache_directory

PROMPT = "the cat and the"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    rows = upstream.library().rows
    if rows is None or rows.table is None:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(draft_form, "COMMON_TOKENS", 150)
    monkeypatch.setattr(draft_form, "_OF_WRITING", 1)
    monkeypatch.setattr(draft_form, "_LEAST_BYTES", 0)


@pytest.fixture
def target(tiny: Any, tmp_path: Path) -> Path:
    return Path(tiny.write_gguf(tiny.build("llama", 1), tmp_path / "target.gguf", "Q8_0"))


@pytest.fixture
def draft(tiny: Any, tmp_path: Path) -> Path:
    """Of the same weights, so that much of what it drafts is right."""
    return Path(tiny.write_gguf(tiny.build("llama", 1), tmp_path / "draft.gguf", "Q8_0"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of which copies were made."""
    found: list[Path] = []
    requantize = GgufExporter.requantize

    def counted(self: GgufExporter, source: Path, *rest: Any) -> None:
        found.append(source)
        requantize(self, source, *rest)

    monkeypatch.setattr(GgufExporter, "requantize", counted)
    return found


def opened(target: Path, draft: Path | str) -> Engine:
    options = {"runtime": "llamacpp", "draft_runtime": "llamacpp", "threads": 1}
    return load(str(target), draft=str(draft), **options)


def copies() -> list[Path]:
    return sorted((cache_directory() / "drafts").glob("*.gguf"))


def texts(engine: Engine) -> Iterator[list[int]]:
    for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=3)):
        yield [each.id for each in engine.generate(PROMPT, max_tokens=24, sampling=params).tokens]


@pytest.mark.usefixtures("fixed_policy")
def test_texts_are_those_without_a_draft_and_the_copy_is_made_once(
    target: Path, draft: Path, made: list[Path]
) -> None:
    with opened(target, "none") as plain:
        expected = list(texts(plain))
    for _ in range(2):
        with opened(target, draft) as engine:
            (opened_draft,) = engine.parts.drafts
            kernels = str(opened_draft.model.capabilities.kernels)
            assert " tokens scored" in kernels
            assert list(texts(engine)) == expected
    assert made == [draft] and len(copies()) == 1
    assert copies()[0].stat().st_size < draft.stat().st_size


@pytest.mark.parametrize(
    "fault", [ExportError("broken", remedy="Wait."), OSError(28, "the disk is full")]
)
def test_a_draft_that_cannot_be_copied_stays_as_it_is(
    fault: Exception,
    target: Path,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def requantize(self: GgufExporter, source: Path, out: Path, *rest: Any) -> None:
        out.write_bytes(b"half")
        raise fault

    monkeypatch.setattr(GgufExporter, "requantize", requantize)
    with caplog.at_level(logging.WARNING), opened(target, draft) as engine:
        assert len(list(texts(engine))) == 2
    assert not copies()
    told = [each.message for each in caplog.records if "stays as it is" in each.message]
    assert len(told) == 1 and "draft" in told[0]


def test_copies_that_were_not_used_for_longest_go(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache_directory() / "drafts"
    folder.mkdir(parents=True)
    for age, name in enumerate(("old", "older")):
        (folder / f"{name}.gguf").write_bytes(bytes(50))
        os.utime(folder / f"{name}.gguf", ns=(10 - age, 10 - age))
    monkeypatch.setattr(draft_form, "_MOST_BYTES", 100)
    opened(target, draft).close()
    assert [each.name.startswith("draft-") for each in copies()] == [True]

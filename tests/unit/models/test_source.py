"""Where a MODEL argument leads, and what makes a cached conversion stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.errors import ModelFileError
from edge_spec.models import source as demo_model
from edge_spec.models import source as sources
from edge_spec.models.source import Source
from fixtures.silence import quiet

OPTIONS = ExportOptions()
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_0.gguf"
    path.write_bytes(b"weights")
    return path


def test_nothing_is_fetched_before_the_path_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(progress: object) -> Path:
        raise AssertionError("fetched")

    monkeypatch.setattr(demo_model, "fetch_demo_model", fetch)
    source = Source("smollm2", quiet)
    assert source.is_demo and source.name == "smollm2"
    source.cached("onnx", OPTIONS)
    with pytest.raises(AssertionError, match="fetched"):
        source.path  # noqa: B018 -- the property is what is tested


def test_a_missing_file_is_named_with_what_a_model_may_be(tmp_path: Path) -> None:
    for missing in (str(tmp_path / "nonesuch.gguf"), "~nobody-of-this-name/nonesuch.gguf"):
        with pytest.raises(ModelFileError, match=r"nonesuch\.gguf.*GGUF file.*smollm2"):
            Source(missing, quiet).path  # noqa: B018


@pytest.mark.parametrize("what", ["content", "time", "format", "options", "version"])
def test_a_conversion_is_stale_after_a_change_of(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = Source(str(gguf), quiet).cached("onnx", OPTIONS)
    format, options = "onnx", OPTIONS
    if what == "content":
        stat = gguf.stat()
        gguf.write_bytes(b"other weights")
        os.utime(gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif what == "time":
        os.utime(gguf, ns=(0, 1))
    elif what == "format":
        format = "gguf"
    elif what == "options":
        options = ExportOptions(num_layers=1)
    else:
        monkeypatch.setattr(sources, "EXPORT_VERSION", sources.EXPORT_VERSION + 1)
    assert Source(str(gguf), quiet).cached(format, options) != before


def test_a_file_added_to_a_directory_makes_its_conversion_stale(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    before = Source(str(directory), quiet).cached("onnx", OPTIONS)
    assert Source(str(directory), quiet).cached("onnx", OPTIONS) == before
    (directory / "more.safetensors").touch()
    assert Source(str(directory), quiet).cached("onnx", OPTIONS) != before

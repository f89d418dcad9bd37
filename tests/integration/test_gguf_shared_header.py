"""The header of a GGUF file is read once while somebody has it open, and its tokenizer made once;
a file that has changed since is read again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
from edge_spec.exporters import gguf_reader, gguf_source
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.exporters.gguf_reader import GgufFile, open_gguf_file


def test_a_file_that_is_open_is_not_read_again(demo_gguf: Path) -> None:
    first = open_gguf_file(demo_gguf)
    assert open_gguf_file(demo_gguf) is first
    assert list(first.metadata) == list(GgufFile(demo_gguf).metadata)


def test_nothing_of_a_file_is_kept_that_nobody_has_open(demo_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"  # which no other test has open
    path.write_bytes(demo_gguf.read_bytes())
    model = open_model_info(path)
    header = weakref.ref(open_gguf_file(path))
    model.tokenizer_json()
    del model
    gc.collect()
    assert header() is None


def test_a_changed_header_is_read_again_even_within_the_clock_of_the_file_system(
    demo_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    content = demo_gguf.read_bytes()
    path.write_bytes(content)
    before = open_gguf_file(path)
    name = before.metadata["general.name"].encode()
    with path.open("r+b") as file:  # the same file, as long as before
        file.seek(content.index(name))
        file.write(b"Z" * len(name))
    after = open_gguf_file(path)
    assert after is not before
    assert after.metadata["general.name"] == "Z" * len(name)


def test_doctor_reads_each_header_and_makes_each_tokenizer_once(
    demo_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(demo_gguf.read_bytes())
    headers: list[Path] = []
    tokenizers: list[Path] = []
    read, made = gguf_reader._Header.__init__, gguf_source.tokenizer_from_gguf

    def counted(self: gguf_reader._Header, buffer: object, path: Path) -> None:
        headers.append(path)
        read(self, buffer, path)  # type: ignore[arg-type]

    def made_of(metadata: object, path: Path) -> object:
        tokenizers.append(path)
        return made(metadata, path)  # type: ignore[arg-type]

    monkeypatch.setattr(gguf_reader._Header, "__init__", counted)
    monkeypatch.setattr(gguf_source, "tokenizer_from_gguf", made_of)
    request = DiagnosisRequest(str(demo_gguf), str(draft))
    report = diagnose(request, lambda what, fraction: None, devices=list)
    assert "the same" in next(each.found for each in report.findings if each.check == "tokens")
    assert sorted(headers) == sorted({demo_gguf, draft})
    assert len(tokenizers) == 1  # both files have one vocabulary

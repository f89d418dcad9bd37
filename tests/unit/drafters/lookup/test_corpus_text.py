"""Corpora as users name them: tokenized, left out or refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from edge_spec.drafters.lookup import corpus_index
from edge_spec.drafters.lookup.corpus_index import CorpusIndex, open_corpus
from edge_spec.errors import EdgeSpecError, ModelFileError, UsageError
from edge_spec.text.tokenizer import Tokenizer
from fixtures.corpora import documents_of


class CountedTokenizer(Tokenizer):
    """Notes what it tokenizes."""

    def __init__(self, json: str, bos_id: int | None = None) -> None:
        super().__init__(json, bos_id)
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return super().encode(text)


@pytest.fixture
def tokenizer(byte_tokenizer_json: str) -> CountedTokenizer:
    return CountedTokenizer(byte_tokenizer_json)


@pytest.fixture
def opened(tokenizer: CountedTokenizer) -> Any:
    """Opens a corpus."""

    def open_(path: Path, using: Tokenizer = tokenizer) -> CorpusIndex:
        return open_corpus(path, using, lambda what, fraction: None)

    return open_


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("hello world")
    (folder / "deep" / "a.md").write_text("good day")
    return folder


def texts_of(index: CorpusIndex, tokenizer: Tokenizer) -> list[str]:
    """Returns its documents, in order."""
    return [tokenizer.decode(document) for document in documents_of(index)]


def refusal(error: type[EdgeSpecError], call: Any, *arguments: Any) -> str:
    """The one line that the call fails with."""
    with pytest.raises(error) as caught:
        call(*arguments)
    line = str(caught.value)
    assert "\n" not in line and caught.value.remedy
    return line


def test_hidden_files_and_links_are_left_out(
    tmp_path: Path, folder: Path, opened: Any, tokenizer: Any, caplog: Any, monkeypatch: Any
) -> None:
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / ".hidden").write_text("secret")
    (folder / "empty.txt").write_text("")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    with socket.socket(socket.AF_UNIX) as no_file:
        monkeypatch.chdir(folder)  # a socket's path must be short
        no_file.bind("socket")
    assert texts_of(opened(folder), tokenizer) == ["hello world", "good day"]
    assert caplog.messages == []


def test_what_is_no_text_is_skipped_with_one_line(
    folder: Path, opened: Any, tokenizer: CountedTokenizer, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(corpus_index, "_HEAD_BYTES", 8)
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (folder / "zeros.bin").write_bytes(b"abc\0def")
    (folder / "late.txt").write_bytes(b"plain text at first \xff")
    (folder / "cut.txt").write_bytes("plain tä".encode()[:-1])
    # The head ends within a character.
    (folder / "umlauts.txt").write_text("1234567äöü", encoding="utf-8")
    (folder / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert texts_of(opened(folder), tokenizer) == [
        "hello world",
        "1234567äöü",
        "one\ntwo\n",
        "good day",
    ]
    [line] = caplog.messages
    assert str(folder / "cut.txt") in line and "and 3 more" in line and "\n" not in line


def test_what_cannot_be_a_corpus_is_refused(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "none").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "no such file" in refusal(UsageError, opened, tmp_path / "nonesuch")
    assert "no such file" in refusal(UsageError, opened, tmp_path / "loop")
    for name in ("empty.txt", "image.png", "none"):
        line = refusal(UsageError, opened, tmp_path / name)
        assert f"no UTF-8 text in {tmp_path / name}" in line


def test_more_text_than_can_be_sorted_is_refused(
    folder: Path, opened: Any, monkeypatch: Any
) -> None:
    (folder / "zeros.bin").write_bytes(bytes(100))  # does not count
    monkeypatch.setattr(corpus_index, "MAX_TEXT_BYTES", 19)
    opened(folder)
    monkeypatch.setattr(corpus_index, "MAX_TEXT_BYTES", 18)
    (folder / "b.txt").touch()
    (folder / "c.bin").write_bytes(bytes(1))
    assert "more than 0 MiB" in refusal(UsageError, opened, folder)


def test_files_that_cannot_be_read_are_named(folder: Path, opened: Any, monkeypatch: Any) -> None:
    open_path = Path.open

    def forbidden(path: Path, *arguments: Any) -> Any:
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open_path(path, *arguments)

    monkeypatch.setattr(Path, "open", forbidden)
    assert str(folder / "b.txt") in refusal(ModelFileError, opened, folder)
    assert str(folder / "b.txt") in refusal(ModelFileError, opened, folder / "b.txt")

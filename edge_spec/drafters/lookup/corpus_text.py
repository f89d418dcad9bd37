"""A corpus as the user names it: texts that are tokenized once, or an index of them."""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.text_codec import TextCodec
from edge_spec.drafters.lookup.corpus_file import VERSION, build_index, is_index, open_index
from edge_spec.drafters.lookup.corpus_index import CorpusIndex
from edge_spec.errors import EdgeSpecError, ModelFileError, UsageError
from edge_spec.storage.atomic import CACHE_VARIABLE, expanded
from edge_spec.text.vocabulary import Vocabulary

MAX_TEXT_BYTES = 128 << 20  # tokenizing takes minutes by then, sorting some 50 bytes a token
_PIECE_CHARACTERS = 1 << 16
_HEAD_BYTES = 1 << 16
_MAX_NAME_CHARACTERS = 40
_WHAT_IS_A_CORPUS = "A corpus is a UTF-8 text, a directory of such texts, or the index of one."
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    path: Path
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> _File:
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)


def open_corpus(path: Path, tokenizer: TextCodec, cache: Path, progress: Progress) -> CorpusIndex:
    """An index file, a UTF-8 text, or a directory: every text below it, each a document.

    Texts are tokenized once; their index is kept below `cache`, and later calls map it until one
    of them changes. Hidden files and symbolic links in a directory are left out, other files that
    are not UTF-8 text with a warning. A damaged index in the cache is built again.

    Raises UsageError for what cannot be a corpus, ModelFileError for what cannot be read.
    """
    vocabulary = Vocabulary.of(tokenizer.vocabulary())
    path = expanded(path)
    try:
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"no such file or directory: {path}", remedy=_WHAT_IS_A_CORPUS)
        path = path.resolve()
        if path.is_file() and is_index(path):
            return open_index(path, vocabulary)
        files = list(_files(path))
        cached = _cached(path, files, vocabulary, cache)
        if cached.exists():
            try:
                return open_index(cached, vocabulary)
            except EdgeSpecError as error:
                _log.warning("Building a corpus index again: %s", error.shown)
        documents = _documents(files, tokenizer, progress)
    except OSError as error:
        raise ModelFileError(
            f"cannot read the corpus: {error}", remedy="Check the permissions of its files."
        ) from None
    if not documents:
        raise UsageError(f"there is no UTF-8 text in {path}", remedy=_WHAT_IS_A_CORPUS)
    _build(documents, vocabulary, cached, progress)
    return open_index(cached, vocabulary)


def _build(
    documents: Sequence[np.ndarray], vocabulary: Vocabulary, cached: Path, progress: Progress
) -> None:
    progress("Sorting the corpus", 0.0)
    try:
        build_index(documents, vocabulary, cached)
    except OSError as error:
        raise ModelFileError(
            f"cannot keep the corpus index: {error}",
            remedy=f"Free some space, or set {CACHE_VARIABLE} to another directory.",
        ) from None
    progress("Sorting the corpus", 1.0)
    of_corpus = _without_state(cached)
    with suppress(OSError):  # Windows keeps what another process has mapped
        for other in cached.parent.iterdir():
            if other != cached and _without_state(other) == of_corpus:
                other.unlink(missing_ok=True)


def _files(path: Path) -> Iterator[_File]:
    """The file itself, or those below the directory, in a fixed order. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    if path.is_file():
        yield _File.of(path)
        return
    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and not file.is_symlink() and file.is_file():
                yield _File.of(file)


def _cached(path: Path, files: Sequence[_File], vocabulary: Vocabulary, cache: Path) -> Path:
    """Named by the corpus and, after the last hyphen, by the state that it is in."""

    def digest(*parts: object) -> str:
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    state = digest([(str(file.path), file.num_bytes, file.changed_ns) for file in files], VERSION)
    name = path.name[:_MAX_NAME_CHARACTERS] or "corpus"
    digests = f"{digest(str(path), vocabulary.sha256)}-{state}"
    return cache / "corpora" / f"{name}-{digests}.corpus"


def _without_state(cached: Path) -> str:
    return cached.name.rpartition("-")[0]


def _documents(
    files: Sequence[_File], tokenizer: TextCodec, progress: Progress
) -> list[np.ndarray]:
    """The tokens [num_tokens] int32 of each file that holds text. Raises OSError, UsageError."""
    # BOS, or the end of a source, where the model wants one: it is no part of a text.
    begin = tokenizer.encode("")
    documents: list[np.ndarray] = []
    skipped: list[Path] = []
    text_bytes = seen_bytes = 0
    total_bytes = max(1, sum(file.num_bytes for file in files))
    for file in files:
        text = _read_text(file.path, MAX_TEXT_BYTES - text_bytes)
        if text is None:
            skipped.append(file.path)
        else:
            parts = [np.empty(0, np.int32)]
            for num_read, piece in _pieces(text):
                fraction = (seen_bytes + file.num_bytes * num_read / len(text)) / total_bytes
                progress("Reading the corpus", fraction)
                parts.append(np.array(text_tokens(piece, tokenizer, begin), np.int32))
            text_bytes += file.num_bytes
            documents.append(np.concatenate(parts))
        seen_bytes += file.num_bytes
    progress("Reading the corpus", 1.0)
    documents = [tokens for tokens in documents if len(tokens)]
    if skipped and documents:
        others = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        _log.warning("Left out of the corpus, not UTF-8 text: %s%s", skipped[0], others)
    return documents


def _read_text(path: Path, max_bytes: int) -> str | None:
    """Reads UTF-8 text; None for others. Raises OSError, and UsageError for a longer text."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        try:  # spares reading all of a large file that is no text
            codecs.getincrementaldecoder("utf-8")().decode(head)
        except UnicodeDecodeError:
            return None
        if b"\0" in head:
            return None
        raw = head + file.read(max_bytes)
    if len(raw) > max_bytes:
        raise UsageError(
            f"the corpus holds more than {MAX_TEXT_BYTES >> 20} MiB of text, with {path}",
            remedy="Give the part of it that answers are likeliest to repeat.",
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n")  # as models end lines


def text_tokens(text: str, tokenizer: TextCodec, around: Sequence[int]) -> list[int]:
    """Returns the tokens that are text; `around`: what the tokenizer begins, or ends, all with."""
    ids = tokenizer.encode(text)
    if around and ids[: len(around)] == list(around):
        del ids[: len(around)]
    elif around and ids[-len(around) :] == list(around):
        del ids[-len(around) :]
    return ids


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Pieces of whole lines, where lines are not too long, and the place where each begins.

    Tokenizers want much memory for a long text; a few tokens at the cuts are other ones for it.
    """
    begin = 0
    while begin < len(text):
        end = begin + _PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield begin, text[begin:end]
        begin = end

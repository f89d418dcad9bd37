"""A corpus as the user names it: texts that are tokenized and sorted when it is opened."""

from __future__ import annotations

import codecs
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.text_codec import TextCodec
from edge_spec.drafters.lookup.corpus_index import CorpusIndex, index_of
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.storage.atomic import cache_directory, expanded
from edge_spec.text.vocabulary import Vocabulary

MAX_TEXT_BYTES = 128 << 20  # tokenizing takes minutes by then, sorting some 50 bytes a token
_PIECE_CHARACTERS = 1 << 16
_HEAD_BYTES = 1 << 16
_WHAT_IS_A_CORPUS = "A corpus is a UTF-8 text, or a directory of such texts."
_log = logging.getLogger(__name__)


def open_corpus(path: Path, tokenizer: TextCodec, progress: Progress) -> CorpusIndex:
    """A UTF-8 text, or a directory: every text below it, each a document.

    Hidden files and symbolic links in a directory are left out, other files that are not UTF-8
    text with a warning.

    Raises UsageError for what cannot be a corpus, ModelFileError for what cannot be read.
    """
    # Indexes that versions before this one kept.
    shutil.rmtree(cache_directory() / "corpora", ignore_errors=True)
    path = expanded(path)
    try:
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"no such file or directory: {path}", remedy=_WHAT_IS_A_CORPUS)
        path = path.resolve()
        documents = _documents(list(_files(path)), tokenizer, progress)
    except OSError as error:
        raise ModelFileError(
            f"cannot read the corpus: {error}", remedy="Check the permissions of its files."
        ) from None
    if not documents:
        raise UsageError(f"there is no UTF-8 text in {path}", remedy=_WHAT_IS_A_CORPUS)
    progress("Sorting the corpus", 0.0)
    index = index_of(documents, Vocabulary.of(tokenizer.vocabulary()).size)
    progress("Sorting the corpus", 1.0)
    return index


def _files(path: Path) -> Iterator[Path]:
    """The file itself, or those below the directory, in a fixed order. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and not file.is_symlink() and file.is_file():
                yield file


def _documents(files: Sequence[Path], tokenizer: TextCodec, progress: Progress) -> list[np.ndarray]:
    """The tokens [num_tokens] int32 of each file that holds text. Raises OSError, UsageError."""
    # BOS, or the end of a source, where the model wants one: it is no part of a text.
    begin = tokenizer.encode("")
    documents: list[np.ndarray] = []
    skipped: list[Path] = []
    text_bytes = seen_bytes = 0
    sizes = [file.stat().st_size for file in files]
    total_bytes = max(1, sum(sizes))
    for file, num_bytes in zip(files, sizes, strict=True):
        text = _read_text(file, MAX_TEXT_BYTES - text_bytes)
        if text is None:
            skipped.append(file)
        else:
            parts = [np.empty(0, np.int32)]
            for num_read, piece in _pieces(text):
                fraction = (seen_bytes + num_bytes * num_read / len(text)) / total_bytes
                progress("Reading the corpus", fraction)
                parts.append(np.array(text_tokens(piece, tokenizer, begin), np.int32))
            text_bytes += num_bytes
            documents.append(np.concatenate(parts))
        seen_bytes += num_bytes
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

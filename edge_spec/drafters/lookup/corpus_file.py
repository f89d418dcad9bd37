"""The file of a corpus index: built once, then mapped.

    magic, version, length and sha256 of the header     _PREAMBLE, little-endian
    header                                              JSON, padded with spaces
    tokens                                              [num_tokens] uint32, big-endian
    suffix array                                        [num_tokens] int32, little-endian

After each document comes a separator, which no text holds, so that matches never span documents.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge_spec.drafters.lookup.corpus_index import SEPARATOR, TOKEN_BYTES, CorpusIndex
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.storage.atomic import atomic_file
from edge_spec.text.vocabulary import Vocabulary

MAGIC = b"\x93ECORPUS"  # not UTF-8: an index, even half of one, is never taken for a text
VERSION = 1
MAX_TOKENS = 2**31 - 2  # separators included; suffixes are int32
CHECKED_BYTES = 64 << 20  # larger data is not hashed at each start: it takes 0.1 s per 100 MB
_PREAMBLE = struct.Struct("<8sII32s")
_ALIGNMENT = 16
_MAX_HEADER_BYTES = 1 << 16
_BUILD_AGAIN = "Delete it and give the texts that it was built from."

Tokens = Sequence[int] | np.ndarray  # [num_tokens]


def is_index(path: Path) -> bool:
    """Says whether the file begins like one. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def index_of(documents: Iterable[Tokens], vocabulary: Vocabulary) -> CorpusIndex:
    """Builds the index of these token sequences in memory. Raises as `build_index` does."""
    tokens, suffixes = _sorted(documents, vocabulary.size)
    return CorpusIndex(tokens.tobytes() + suffixes.tobytes(), 0, len(tokens), vocabulary.size)


def build_index(
    documents: Iterable[Tokens], vocabulary: Vocabulary, out: Path, mode: int = 0o644
) -> None:
    """Writes the index of these token sequences, which appears whole or not at all.

    Raises ValueError where there is no token, or one that the vocabulary does not have, and
    UsageError for more than MAX_TOKENS.
    """
    stored = _sorted(documents, vocabulary.size)
    digest = hashlib.sha256()
    for array in stored:
        digest.update(array.view(np.uint8).data)
    fields = {
        "num_tokens": len(stored[0]),
        "sha256": digest.hexdigest(),
        "vocabulary": vocabulary.sha256,
    }
    header = json.dumps(fields).encode()
    header += b" " * (-(_PREAMBLE.size + len(header)) % _ALIGNMENT)
    with atomic_file(out, mode) as work, work.open("wb") as file:
        header_sha256 = hashlib.sha256(header).digest()
        file.write(_PREAMBLE.pack(MAGIC, VERSION, len(header), header_sha256) + header)
        for array in stored:
            file.write(array.view(np.uint8).data)  # tofile does not report a full disk


def open_index(path: Path, vocabulary: Vocabulary, in_memory: bool = False) -> CorpusIndex:
    """Maps the index for reading, or reads all of it.

    The header is always checked, and that the file has the size that it states; the sha256 of
    the data up to CHECKED_BYTES. Beyond that damage goes unnoticed, but it costs right draft tokens
    only: see CorpusIndex. Raises ModelFileError, and UsageError for another tokenizer's index.
    """
    data, offset, fields = _mapped(path)
    num_tokens, expected, built_with = fields
    if built_with != vocabulary.sha256:
        raise UsageError(
            f"{path} was built with the tokenizer of another model",
            remedy="Give the texts instead, or an index that was built with this model.",
        )
    if len(data) <= CHECKED_BYTES:
        with memoryview(data) as view:
            if hashlib.sha256(view[offset:]).hexdigest() != expected:
                raise _damaged(path, "its sha256 differs")
    if not in_memory:
        return CorpusIndex(data, offset, num_tokens, vocabulary.size)
    with data:
        return CorpusIndex(data[:], offset, num_tokens, vocabulary.size)


def check_index(path: Path) -> None:
    """Checks header and size, whatever the vocabulary. Raises ModelFileError."""
    _mapped(path)[0].close()


def _mapped(path: Path) -> tuple[mmap, int, tuple[int, str, str]]:
    """The file, where its tokens begin, and num_tokens, sha256 and vocabulary."""
    try:
        with path.open("rb") as file:
            fields = _read_header(file, path)
            offset = file.tell()
            data = mmap(file.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error}", remedy=_BUILD_AGAIN) from None
    checked = _checked_fields(fields, path)
    num_bytes = offset + 2 * TOKEN_BYTES * checked[0]
    if len(data) != num_bytes:
        raise _damaged(path, f"it has {len(data)} bytes, not {num_bytes}")
    return data, offset, checked


def sorted_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Returns the suffix array of `tokens` [num_tokens] uint32: [num_tokens] int32, the places
    where suffixes begin, in the order of the suffixes.

    Prefix doubling (Manber & Myers 1990): once suffixes are sorted by their first `width` tokens,
    the order of the suffixes that begin `width` further on sorts them by twice as many. Only
    those that still equal a neighbour are sorted again (Larsson & Sadakane 2007), each time with
    one sort of integers, so repetitive text costs a pass for each doubling and no more.
    """
    num_tokens = len(tokens)
    suffixes = np.arange(num_tokens, dtype=np.int32)
    # Of each suffix, the first place of those that are equal to it so far; the end is before all.
    group = np.full(num_tokens + 1, -1, np.int32)
    unsorted = suffixes.copy()  # places
    keys = tokens.astype(np.int64)
    width = 1
    while len(unsorted):
        order = np.argsort(keys)
        keys = keys[order]
        members = suffixes[unsorted][order]
        suffixes[unsorted] = members
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        sizes = np.diff(first, append=len(keys))
        group[members] = np.repeat(unsorted[first], sizes)
        unsorted = unsorted[np.repeat(sizes > 1, sizes)]
        members = suffixes[unsorted]
        # A suffix that ends before `width` equals no other: members + width is the end or less.
        keys = group[members].astype(np.int64) << 32 | (group[members + width] + 1)
        width *= 2
    return suffixes


def _sorted(documents: Iterable[Tokens], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and suffix array, as they are stored."""
    tokens = _joined(documents, vocab_size)
    return tokens.astype(">u4"), sorted_suffixes(tokens).astype("<i4")


def _joined(documents: Iterable[Tokens], vocab_size: int) -> np.ndarray:
    """[num_tokens] uint32; a separator after each document."""
    parts: list[np.ndarray] = []
    separator = np.array([SEPARATOR], np.uint32)
    num_tokens = 0
    for document in documents:
        ids = np.asarray(document, np.int64)
        if not len(ids):
            continue
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError("a document has a token that is not in the vocabulary")
        parts += [ids.astype(np.uint32), separator]
        num_tokens += len(ids) + 1
        if num_tokens > MAX_TOKENS:
            raise UsageError(
                f"the corpus has more than {MAX_TOKENS} tokens", remedy="Give fewer texts."
            )
    if not parts:
        raise ValueError("there is no token to index")
    return np.concatenate(parts)


def _read_header(file: BinaryIO, path: Path) -> object:
    """Leaves the file where the tokens begin."""
    preamble = file.read(_PREAMBLE.size)
    if preamble[: len(MAGIC)] != MAGIC:
        raise ModelFileError(f"{path} is not a corpus index", remedy="Give a text or a directory.")
    if len(preamble) < _PREAMBLE.size:
        raise _damaged(path, "it ends in its header")
    _, version, header_bytes, expected = _PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise ModelFileError(
            f"{path} is a corpus index of version {version}; this is for version {VERSION}",
            remedy=_BUILD_AGAIN,
        )
    if header_bytes > _MAX_HEADER_BYTES:
        raise _damaged(path, "its header is too long")
    header = file.read(header_bytes)
    if hashlib.sha256(header).digest() != expected:
        raise _damaged(path, "the sha256 of its header differs")
    try:
        return json.loads(header)
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is not JSON") from None


def _checked_fields(fields: object, path: Path) -> tuple[int, str, str]:
    """num_tokens, sha256 and vocabulary."""
    if isinstance(fields, dict):
        match fields.get("num_tokens"), fields.get("sha256"), fields.get("vocabulary"):
            case int(num_tokens), str(digest), str(vocabulary) if num_tokens > 0:
                return num_tokens, digest, vocabulary
    raise _damaged(path, "its header lacks something")


def _damaged(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {why}", remedy=_BUILD_AGAIN)

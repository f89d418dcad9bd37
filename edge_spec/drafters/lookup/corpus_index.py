"""Look-ups in the suffix array of a corpus (Manber & Myers 1990).

Suffixes with a common beginning are neighbours in sorted order, so bisection finds a sequence's
occurrences as an interval, with one interval inside per following token. An array takes eight bytes
per token, token included. Separators keep matches from spanning documents.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.storage.atomic import expanded
from edge_spec.text.vocabulary import Vocabulary

MAX_MATCH = 16  # tokens; longer matches predict no better
SEPARATOR = 0xFFFFFFFF  # after each document: no token, sorted after all
TOKEN_BYTES = 4
MAX_FOLLOWING = 8  # tokens after a match; a tree does not need less likely ones
_SAMPLE = 64  # occurrences looked at, if there are more


Tokens = Sequence[int] | np.ndarray  # [num_tokens]


class CorpusMatch(NamedTuple):
    """A token sequence and its places low..high-1 in the suffix array."""

    length: int  # tokens
    low: int
    high: int

    @property
    def num_occurrences(self) -> int:
        return self.high - self.low


class CorpusIndex:
    """A corpus in memory. Build it with `index_of`."""

    def __init__(self, tokens: bytes, suffixes: np.ndarray, vocab_size: int) -> None:
        """tokens: 4 bytes each, big-endian, so that they compare like numbers. suffixes:
        [num_tokens] int32, the suffix array."""
        self.num_tokens = len(suffixes)  # separators included
        self._tokens = tokens
        self._suffixes = suffixes.data  # reads numbers faster than numpy
        self._vocab_size = vocab_size

    def match(self, text: Sequence[int]) -> CorpusMatch:
        """Return the longest suffix of `text` that occurs, up to MAX_MATCH tokens."""
        end = list(text[-MAX_MATCH:])
        for place in range(len(end) - 1, -1, -1):
            if not 0 <= end[place] < self._vocab_size:
                del end[: place + 1]
                break
        pattern = struct.pack(f">{len(end)}I", *end)
        longest, low, too_long = 0, 0, len(end) + 1
        while longest + 1 < too_long:
            # If a suffix occurs, all its own suffixes do.
            length = (longest + too_long) // 2
            first = self._first_place(pattern[-TOKEN_BYTES * length :])
            if first is None:
                too_long = length
            else:
                longest, low = length, first
        if longest == 0:
            return CorpusMatch(0, 0, self.num_tokens)
        sought = pattern[-TOKEN_BYTES * longest :]
        high = bisect_right(self._suffixes, sought, low + 1, key=self._reader(0, longest))
        return CorpusMatch(longest, low, high)

    def following(self, match: CorpusMatch) -> list[tuple[int, CorpusMatch]]:
        """Return the MAX_FOLLOWING most frequent next tokens, each with the match extended by it.
        With over _SAMPLE occurrences, counts an evenly spread sample."""
        low, count = match.low, match.num_occurrences
        sampled = min(count, _SAMPLE)
        places = [low + i * count // sampled for i in range(sampled + 1)]
        read = self._reader(match.length, 1)
        found: dict[int, CorpusMatch] = {}
        for raw, first, end in _runs([read(self._suffixes[place]) for place in places[:-1]]):
            token = int.from_bytes(raw, "big")
            if token >= self._vocab_size:
                continue  # a separator
            # The run starts after the sampled place before it and ends before the next one.
            begins_after = places[first - 1] if first else low - 1
            start = bisect_left(self._suffixes, raw, begins_after + 1, places[first], key=read)
            stop = bisect_right(self._suffixes, raw, places[end - 1] + 1, places[end], key=read)
            found[token] = CorpusMatch(match.length + 1, start, stop)
            if len(found) == MAX_FOLLOWING:
                break
        return list(found.items())

    def _first_place(self, sought: bytes) -> int | None:
        """Return the first place whose suffix begins with `sought`, or None."""
        read = self._reader(0, len(sought) // TOKEN_BYTES)
        place = bisect_left(self._suffixes, sought, key=read)
        if place < self.num_tokens and read(self._suffixes[place]) == sought:
            return place
        return None

    def _reader(self, skipped: int, count: int) -> Callable[[int], bytes]:
        """Return a reader of `count` tokens of a suffix, after the first `skipped`. Look-ups never
        depend on what follows a separator, and the last token is one."""
        data, offset = self._tokens, TOKEN_BYTES * skipped
        width = TOKEN_BYTES * count

        def read(suffix: int) -> bytes:
            begin = offset + TOKEN_BYTES * suffix
            return data[begin : begin + width]

        return read


def _runs(values: list[bytes]) -> list[tuple[bytes, int, int]]:
    """Return (value, first index, end index) of equal neighbours, longest first."""
    runs = []
    begin = 0
    for value, run in groupby(values):
        end = begin + len(list(run))
        runs.append((value, begin, end))
        begin = end
    runs.sort(key=lambda run: run[1] - run[2])
    return runs


def index_of(documents: Iterable[Tokens], vocab_size: int) -> CorpusIndex:
    """Build the index of these token sequences. Raises ValueError without any token, or for one
    outside the vocabulary."""
    tokens = _joined(documents, vocab_size)
    return CorpusIndex(tokens.astype(">u4").tobytes(), sorted_suffixes(tokens), vocab_size)


def sorted_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Return the suffix array of `tokens` [num_tokens] uint32: sorted starts, [num_tokens] int32.

    Prefix doubling (Manber & Myers 1990): the order by `width` tokens, looked up `width` later,
    gives the order by twice as many. Only those that still equal a neighbour are sorted again
    (Larsson & Sadakane 2007).
    """
    num_tokens = len(tokens)
    suffixes = np.arange(num_tokens, dtype=np.int32)
    # By suffix, the first place of its equals so far; the end sorts first.
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
        # A suffix that ends before `width` equals no other, so members + width is at most the end.
        keys = group[members].astype(np.int64) << 32 | (group[members + width] + 1)
        width *= 2
    return suffixes


def _joined(documents: Iterable[Tokens], vocab_size: int) -> np.ndarray:
    """Return [num_tokens] uint32, with a separator after each document."""
    parts: list[np.ndarray] = []
    separator = np.array([SEPARATOR], np.uint32)
    for document in documents:
        ids = np.asarray(document, np.int64)
        if not len(ids):
            continue
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError("a document has a token that is not in the vocabulary")
        parts += [ids.astype(np.uint32), separator]
    if not parts:
        raise ValueError("there is no token to index")
    return np.concatenate(parts)


MAX_TEXT_BYTES = 128 << 20  # tokenizing then takes minutes, sorting some 50 bytes per token
_PIECE_CHARACTERS = 1 << 16
_HEAD_BYTES = 1 << 16
_WHAT_IS_A_CORPUS = "A corpus is a UTF-8 text, or a directory of such texts."
_log = logging.getLogger(__name__)


def open_corpus(path: Path, tokenizer: TextCodec, progress: Progress) -> CorpusIndex:
    """Index a UTF-8 text, or every text in a directory but hidden files and symbolic links.

    Other files are skipped with a warning. Raises UsageError for what cannot be a corpus,
    ModelFileError for what cannot be read.
    """
    path = expanded(path)
    try:
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"no such file or directory: {path}", remedy=_WHAT_IS_A_CORPUS)
        path = path.resolve()
        texts = _read_texts(_files(path))
    except OSError as error:
        raise ModelFileError(
            f"cannot read the corpus: {error}", remedy="Check the permissions of its files."
        ) from None
    if not texts:
        raise UsageError(f"there is no UTF-8 text in {path}", remedy=_WHAT_IS_A_CORPUS)
    # BOS or an end of source, if the model wants one, is not part of a text.
    around = tokenizer.encode("")
    documents: list[np.ndarray] = []
    done, total = 0, sum(map(len, texts))
    for text in texts:
        parts: list[np.ndarray] = []
        for piece in _pieces(text):
            progress("Reading the corpus", done / total)
            parts.append(np.array(text_tokens(piece, tokenizer, around), np.int32))
            done += len(piece)
        documents.append(np.concatenate(parts))
    progress("Sorting the corpus", 0.0)
    index = index_of(documents, Vocabulary.of(tokenizer.vocabulary()).size)
    progress("Sorting the corpus", 1.0)
    return index


def _files(path: Path) -> list[Path]:
    """Return the file itself, or the files below the directory, in a fixed order."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*"), key=lambda each: (each.parent, each.name))
    return [
        each
        for each in found
        if each.is_file()
        and not each.is_symlink()
        and not any(part.startswith(".") for part in each.relative_to(path).parts)
    ]


def _read_texts(files: Sequence[Path]) -> list[str]:
    """Read the text files. Raises OSError, and UsageError if they are too long."""
    texts: list[str] = []
    skipped: list[Path] = []
    room = MAX_TEXT_BYTES
    for file in files:
        with file.open("rb") as opened:
            raw = opened.read(_HEAD_BYTES)
            if b"\0" not in raw:  # otherwise it is no text and may be long
                raw += opened.read(max(0, room + 1 - len(raw)))
        try:
            text = None if b"\0" in raw else raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = None
        if text is None:
            skipped.append(file)
            continue
        room -= len(raw)
        if room < 0:
            raise UsageError(
                f"the corpus holds more than {MAX_TEXT_BYTES >> 20} MiB of text, with {file}",
                remedy="Give the part of it that answers are likeliest to repeat.",
            )
        if text:
            texts.append(text.replace("\r\n", "\n"))  # as models end lines
    if skipped and texts:
        others = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        _log.warning("Left out of the corpus, not UTF-8 text: %s%s", skipped[0], others)
    return texts


def text_tokens(text: str, tokenizer: TextCodec, around: Sequence[int]) -> list[int]:
    """Return the tokens of a text alone. around: what the tokenizer adds at the beginning or
    end."""
    ids = tokenizer.encode(text)
    if around and ids[: len(around)] == list(around):
        del ids[: len(around)]
    elif around and ids[-len(around) :] == list(around):
        del ids[-len(around) :]
    return ids


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of whole lines if possible, since tokenizers need much memory for long texts."""
    begin = 0
    while begin < len(text):
        end = begin + _PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end

"""The index of a corpus against a search that tries every place, and the file that holds it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.lookup import corpus_file
from edge_spec.drafters.lookup.corpus_file import (
    build_index,
    check_index,
    index_of,
    is_index,
    open_index,
    sorted_suffixes,
)
from edge_spec.drafters.lookup.corpus_index import (
    MAX_FOLLOWING,
    MAX_MATCH,
    SEPARATOR,
    CorpusIndex,
    CorpusMatch,
)
from edge_spec.errors import EdgeSpecError, ModelFileError, UsageError
from edge_spec.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary("a" * 64, 4)
LARGE = Vocabulary("a" * 64, 100)
DOCUMENTS: tuple[list[int], ...] = ([1, 2, 3, 1, 2, 0], [], [2, 1, 2])
PREAMBLE_BYTES = 48

document_lists = st.integers(1, 4).flatmap(
    lambda alphabet: st.lists(
        st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=40), min_size=1, max_size=4
    )
)
texts = st.lists(st.integers(-1, 4), max_size=24)  # also what no vocabulary has


def count(documents: Sequence[Sequence[int]], sought: Sequence[int]) -> int:
    """Occurrences, by looking at every place."""
    return sum(
        list(document[place : place + len(sought)]) == list(sought)
        for document in documents
        for place in range(len(document) - len(sought) + 1)
    )


def longest_end(documents: Sequence[Sequence[int]], text: Sequence[int]) -> list[int]:
    ends = (list(text[len(text) - n :]) for n in range(min(MAX_MATCH, len(text)), 0, -1))
    return next((end for end in ends if count(documents, end)), [])


@given(
    tokens=st.integers(1, 5).flatmap(
        lambda alphabet: st.lists(
            st.sampled_from([*range(alphabet), SEPARATOR]), min_size=1, max_size=80
        )
    )
)
def test_suffixes_are_sorted(tokens: list[int]) -> None:
    expected = sorted(range(len(tokens)), key=lambda place: tokens[place:])
    found = sorted_suffixes(np.array(tokens, np.uint32))
    assert found.dtype == np.int32 and found.tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "most_passes", "most_sorted"),
    [
        (np.zeros(5000), 14, 14),  # 1 + log2(5000)
        (np.arange(5000) % 7, 14, 14),
        (np.tile(np.random.default_rng(0).integers(0, 300, 1250), 4), 14, 14),
        # Only what is equal so far is sorted again.
        (np.random.default_rng(0).integers(0, 1000, 5000), 14, 2.1),
    ],
    ids=["one token", "a period", "four copies", "hardly repetitive"],
)
def test_repetitive_text_is_sorted_in_a_logarithm_of_passes(
    monkeypatch: Any, tokens: np.ndarray, most_passes: int, most_sorted: float
) -> None:
    sizes: list[int] = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda keys: sizes.append(len(keys)) or argsort(keys))
    suffixes = sorted_suffixes(tokens.astype(np.uint32)).tolist()
    assert len(sizes) <= most_passes and sum(sizes) <= most_sorted * 5000
    as_bytes = tokens.astype(">u4").tobytes()
    assert suffixes == sorted(range(5000), key=lambda place: as_bytes[4 * place :])


@given(documents=document_lists, text=texts)
def test_a_match_is_the_longest_end_and_what_follows_is_counted(
    documents: list[list[int]], text: list[int]
) -> None:
    index = index_of(documents, VOCABULARY)
    match, sought = index.match(text), longest_end(documents, text)
    assert match.length == len(sought)
    if sought:
        assert match.num_occurrences == count(documents, sought)
    expected = {token: count(documents, [*sought, token]) for token in range(4)}
    found = index.following(match)
    # The least frequent token may hide between the samples of a match that occurs so often.
    if match.num_occurrences <= 64:
        assert {token for token, _ in found} == {token for token, n in expected.items() if n}
    for token, longer in found:
        assert longer.num_occurrences == expected[token] and longer.length == len(sought) + 1
        if longer.length <= MAX_MATCH:
            assert longer == index.match([*sought, token])


@given(documents=document_lists)
def test_the_documents_are_kept_and_no_token_outside_the_vocabulary(
    documents: list[list[int]],
) -> None:
    index = index_of(documents, VOCABULARY)
    assert [document.tolist() for document in index.documents()] == documents
    known = CorpusIndex(index._data, 0, index.num_tokens, vocab_size=2)
    expected = [document for document in documents if max(document) < 2]
    assert [document.tolist() for document in known.documents()] == expected
    found = known.following(CorpusMatch(0, 0, index.num_tokens))
    assert {token for token, _ in found} == {each for text in documents for each in text} & {0, 1}


def test_of_many_occurrences_the_frequent_continuations_are_found_and_counted_exactly() -> None:
    drawn = np.random.default_rng(0).choice(40, 2000, p=[0.5, 0.3, *[0.2 / 38] * 38]).tolist()
    index = index_of([[99, token] for token in drawn], LARGE)
    found = index.following(index.match([99]))
    assert len(found) == MAX_FOLLOWING and [token for token, _ in found[:2]] == [0, 1]
    for token, longer in found:
        assert longer.num_occurrences == Counter(drawn)[token]
        assert longer == index.match([99, token])


def test_of_few_occurrences_the_most_frequent_continuations_are_found() -> None:
    documents = [[99, token] for token in range(20) for _ in range(1 + 2 * (token >= 12))]
    index = index_of(documents, LARGE)
    assert index.match([99]).num_occurrences == 36
    assert sorted(token for token, _ in index.following(index.match([99]))) == list(range(12, 20))


@given(data=st.binary(min_size=8, max_size=240), text=texts)
def test_damaged_data_costs_draft_tokens_only(data: bytes, text: list[int]) -> None:
    num_tokens = len(data) // 8
    index = CorpusIndex(data, 0, num_tokens, 4)
    matches = [index.match(text), CorpusMatch(0, 0, num_tokens)]
    for _ in range(20):
        if matches:
            match = matches.pop()
            assert 0 <= match.low < match.high <= num_tokens
            found = index.following(match)
            assert len({token for token, _ in found}) == len(found)  # also out of order
            assert all(0 <= token < 4 for token, _ in found)
            matches += [longer for _, longer in found]
    assert all(0 <= document.max() < 4 for document in index.documents())


class CountedBytes(bytes):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        CountedBytes.num_reads += 1
        return super().__getitem__(key)


def test_a_look_up_reads_a_logarithm_of_the_corpus() -> None:
    # Sorted by hand: a suffix is decided by its first token, 0, 1, 2, ...
    num_tokens = 1 << 16
    numbers = np.arange(num_tokens)
    data = numbers.astype(">u4").tobytes() + numbers.astype("<i4").tobytes()
    index = CorpusIndex(CountedBytes(data), 0, num_tokens, num_tokens)
    CountedBytes.num_reads = 0
    assert index.match(list(range(100, 100 + MAX_MATCH))).length == MAX_MATCH
    # Five lengths and the end of the interval, each a bisection of 17 steps at most.
    assert CountedBytes.num_reads <= 6 * 18
    CountedBytes.num_reads = 0
    index.following(CorpusMatch(0, 0, num_tokens))
    # A sample, and two bisections of the gaps beside it, of 2**10, for each token returned.
    assert CountedBytes.num_reads <= 64 + MAX_FOLLOWING * 2 * 11


# The file


def built(tmp_path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS) -> Path:
    path = tmp_path / "docs.corpus"
    build_index(documents, VOCABULARY, path)
    return path


def data_offset(raw: bytes) -> int:
    return PREAMBLE_BYTES + int.from_bytes(raw[12:16], "little")


def with_header(raw: bytes, header: bytes) -> bytes:
    """The index with another header, whose checksum is right."""
    preamble = raw[:12] + struct.pack("<I", len(header)) + hashlib.sha256(header).digest()
    return preamble + header + raw[data_offset(raw) :]


def with_fields(raw: bytes, **changed: object) -> bytes:
    fields = json.loads(raw[PREAMBLE_BYTES : data_offset(raw)]) | changed
    kept = {name: value for name, value in fields.items() if value != "absent"}
    return with_header(raw, json.dumps(kept).encode())


def refused(path: Path, error: type[EdgeSpecError] = ModelFileError) -> str:
    """The one line that opening it fails with."""
    with pytest.raises(error) as caught:
        open_index(path, VOCABULARY)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line and caught.value.remedy
    return line


def test_the_file_is_laid_out_as_documented(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw, tokens = path.read_bytes(), [1, 2, 3, 1, 2, 0, SEPARATOR, 2, 1, 2, SEPARATOR]
    magic, version, header_bytes, header_sha256 = struct.unpack_from("<8sII32s", raw)
    header, data = raw[PREAMBLE_BYTES : data_offset(raw)], raw[data_offset(raw) :]
    assert (magic, version, header_bytes) == (b"\x93ECORPUS", 1, len(header))
    assert hashlib.sha256(header).digest() == header_sha256
    assert json.loads(header) == {
        "num_tokens": len(tokens),
        "sha256": hashlib.sha256(data).hexdigest(),
        "vocabulary": VOCABULARY.sha256,
    }
    assert np.frombuffer(data[: 4 * len(tokens)], ">u4").tolist() == tokens
    suffixes = np.frombuffer(data[4 * len(tokens) :], "<i4").tolist()
    assert suffixes == sorted(range(len(tokens)), key=lambda place: tokens[place:])
    assert data_offset(raw) % 16 == 0 and is_index(path)
    check_index(path)


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_index_replaces_the_one_before(tmp_path: Path, in_memory: bool) -> None:
    path = built(tmp_path)
    before = open_index(path, VOCABULARY, in_memory)
    build_index((np.array(each, np.int32) for each in ([3, 0],)), VOCABULARY, path, 0o600)
    assert open_index(path, VOCABULARY, in_memory).match([3, 0]).length == 2
    assert before.match([1, 2, 3]).length == 3  # what is opened stays
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("documents", [[], [[]], [[1, -1]], [[4]], [[1], [2**40]]])
def test_what_cannot_be_indexed_leaves_no_file(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        built(tmp_path, documents)
    assert list(tmp_path.iterdir()) == []


def test_more_tokens_than_suffixes_can_number_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(corpus_file, "MAX_TOKENS", 5)
    built(tmp_path, [[1], [2, 3]])
    with pytest.raises(UsageError, match="more than 5 tokens"):
        built(tmp_path, [[1], [2, 3, 0]])


def test_every_truncation_and_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    damaged = [raw[:size] for size in range(len(raw))] + [raw + b"\0"]
    damaged += [
        raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :]
        for place in range(len(raw))
        for bit in (0x01, 0x80)
    ]
    for each in damaged:
        path.write_bytes(each)
        refused(path)


FIELDS: list[dict[str, object]] = [
    *({"num_tokens": lie} for lie in (0, -11, 10, 12, 2**31, 2**64, 11.0, "11", None, [11])),
    *({name: "absent"} for name in ("num_tokens", "sha256", "vocabulary")),
    *({"sha256": lie} for lie in ("", "0" * 64, 1, None)),
    *({"vocabulary": lie} for lie in (1, None, ["a" * 64])),
]


def changes(raw: bytes) -> Iterator[tuple[bytes, type[EdgeSpecError], str]]:
    """The index as it must not be, and what is said of it."""
    for other in (b"", b"text", b"\x93ECORPUT" + bytes(100), b"GGUF" + bytes(100)):
        yield other, ModelFileError, "not a corpus index"
    for version in (0, 2, 2**32 - 1):
        changed = raw[:8] + struct.pack("<I", version) + raw[12:]
        yield changed, ModelFileError, f"version {version}"
    for fields in FIELDS:
        yield with_fields(raw, **fields), ModelFileError, "damaged"
    for header in (b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 60_000):
        yield with_header(raw, header), ModelFileError, "header"
    yield with_header(raw, b"{}".ljust((1 << 16) + 1)), ModelFileError, "is too long"
    yield with_fields(raw, vocabulary="b" * 64), UsageError, "tokenizer of another model"


def test_what_is_no_index_of_this_model_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(with_header(raw, raw[PREAMBLE_BYTES : data_offset(raw)].ljust(1 << 16)))
    open_index(path, VOCABULARY)  # the rewriting itself is sound
    for changed, error, why in changes(raw):
        path.write_bytes(changed)
        assert why in refused(path, error), changed[:200]


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none")
    assert "cannot read" in refused(tmp_path)


def test_large_data_is_not_hashed(tmp_path: Path, monkeypatch: Any) -> None:
    path = built(tmp_path)
    monkeypatch.setattr(corpus_file, "CHECKED_BYTES", path.stat().st_size - 1)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    open_index(path, VOCABULARY)
    monkeypatch.setattr(corpus_file, "CHECKED_BYTES", path.stat().st_size)
    assert "sha256" in refused(path)


def test_a_vocabulary_is_its_tokens_and_their_ids() -> None:
    vocabulary = Vocabulary.of({"a": 0, "b": 5})
    assert vocabulary == Vocabulary.of({"b": 5, "a": 0})
    assert vocabulary.size == 6 and Vocabulary.of({}).size == 0
    others = [{"a": 5, "b": 0}, {"a": 0}, {"a": 0, "b": 6}, {"a": 0, "c": 5}, {"a": 0, "b\n": 5}]
    digests = {vocabulary.sha256, *(Vocabulary.of(other).sha256 for other in others)}
    assert len(digests) == 1 + len(others)

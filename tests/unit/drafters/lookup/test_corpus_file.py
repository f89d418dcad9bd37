"""The file of a corpus index: what is built, what is refused, what damage can do."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.lookup import corpus_file
from edge_spec.drafters.lookup.corpus_file import (
    build_index,
    is_index,
    open_index,
    sorted_suffixes,
)
from edge_spec.drafters.lookup.corpus_index import SEPARATOR
from edge_spec.errors import EdgeSpecError, ModelFileError, UsageError
from edge_spec.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary("a" * 64, 10)
DOCUMENTS: tuple[list[int], ...] = ([1, 2, 3, 1, 2, 4], [], [5, 1, 2])
TOKENS = [1, 2, 3, 1, 2, 4, SEPARATOR, 5, 1, 2, SEPARATOR]
PREAMBLE_BYTES = 48


def built(tmp_path: Path, documents: Sequence[Sequence[int]] = DOCUMENTS) -> Path:
    path = tmp_path / "docs.corpus"
    build_index(documents, VOCABULARY, path)
    return path


def data_offset(raw: bytes) -> int:
    return PREAMBLE_BYTES + int.from_bytes(raw[12:16], "little")


def with_header(raw: bytes, header: bytes) -> bytes:
    """The index with another header, whose checksum is right."""
    data = raw[data_offset(raw) :]
    preamble = raw[:12] + struct.pack("<I", len(header)) + hashlib.sha256(header).digest()
    return preamble + header + data


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
    "tokens",
    [
        np.zeros(5000),
        np.arange(5000) % 7,
        np.tile(np.random.default_rng(0).integers(0, 300, 1250), 4),
    ],
    ids=["one token", "a period", "four copies"],
)
def test_repetitive_text_is_sorted_in_a_logarithm_of_passes(
    monkeypatch: Any, tokens: np.ndarray
) -> None:
    sizes: list[int] = []
    argsort = np.argsort

    def counted(keys: np.ndarray) -> np.ndarray:
        sizes.append(len(keys))
        return argsort(keys)

    monkeypatch.setattr(np, "argsort", counted)
    suffixes = sorted_suffixes(tokens.astype(np.uint32))
    assert len(sizes) <= 14  # 1 + log2(5000)
    assert sorted(suffixes.tolist()) == list(range(5000))
    as_bytes = tokens.astype(">u4").tobytes()
    in_order = [as_bytes[4 * suffix :] for suffix in suffixes.tolist()]
    assert all(one < other for one, other in itertools.pairwise(in_order))


def test_text_without_repetition_is_sorted_in_few_passes(monkeypatch: Any) -> None:
    sizes: list[int] = []
    argsort = np.argsort

    def counted(keys: np.ndarray) -> np.ndarray:
        sizes.append(len(keys))
        return argsort(keys)

    monkeypatch.setattr(np, "argsort", counted)
    sorted_suffixes(np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint32))
    assert sum(sizes) < 2.1 * 5000  # only what is equal so far is sorted again


def test_the_file_is_laid_out_as_documented(tmp_path: Path) -> None:
    raw = built(tmp_path).read_bytes()
    magic, version, header_bytes, header_sha256 = struct.unpack_from("<8sII32s", raw)
    assert (magic, version) == (b"\x93ECORPUS", 1)
    header = raw[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes]
    assert hashlib.sha256(header).digest() == header_sha256
    data = raw[PREAMBLE_BYTES + header_bytes :]
    assert json.loads(header) == {
        "num_tokens": len(TOKENS),
        "sha256": hashlib.sha256(data).hexdigest(),
        "vocabulary": VOCABULARY.sha256,
    }
    assert np.frombuffer(data[: 4 * len(TOKENS)], ">u4").tolist() == TOKENS
    suffixes = np.frombuffer(data[4 * len(TOKENS) :], "<i4").tolist()
    assert suffixes == sorted(range(len(TOKENS)), key=lambda place: TOKENS[place:])
    assert (len(raw) - len(data)) % 16 == 0


def test_what_was_built_is_found(tmp_path: Path) -> None:
    path = built(tmp_path)
    assert is_index(path)
    index = open_index(path, VOCABULARY)
    assert index.num_tokens == len(TOKENS)
    match = index.match([9, 1, 2])
    assert (match.length, match.num_occurrences) == (2, 3)
    found = index.following(match)
    assert {token: longer.num_occurrences for token, longer in found} == {3: 1, 4: 1}


def test_documents_may_be_arrays_and_come_one_by_one(tmp_path: Path) -> None:
    expected = built(tmp_path).read_bytes()
    other = tmp_path / "other.corpus"
    build_index((np.array(document, np.int32) for document in DOCUMENTS), VOCABULARY, other)
    assert other.read_bytes() == expected


def test_an_index_replaces_the_one_before(tmp_path: Path) -> None:
    path = built(tmp_path)
    before = open_index(path, VOCABULARY)
    build_index([[7, 8]], VOCABULARY, path)
    assert open_index(path, VOCABULARY).match([7, 8]).length == 2
    assert before.match([1, 2, 3]).length == 3  # what is mapped stays
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("documents", [[], [[]], [[1, -1]], [[10]], [[1], [2**40]]])
def test_what_cannot_be_indexed_leaves_no_file(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        built(tmp_path, documents)
    assert list(tmp_path.iterdir()) == []


def test_more_tokens_than_suffixes_can_number_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(corpus_file, "MAX_TOKENS", 5)
    built(tmp_path, [[1], [2, 3]])
    with pytest.raises(UsageError, match="more than 5 tokens"):
        built(tmp_path, [[1], [2, 3, 4]])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        refused(path)
    path.write_bytes(raw + b"\0")
    assert f"{len(raw) + 1} bytes, not {len(raw)}" in refused(path)


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    for place in range(len(raw)):
        for bit in (0x01, 0x80):
            changed = bytearray(raw)
            changed[place] ^= bit
            path.write_bytes(changed)
            refused(path)


@pytest.mark.parametrize("raw", [b"", b"text", b"\x93ECORPUT" + bytes(100), b"GGUF" + bytes(100)])
def test_what_is_no_index_is_called_so(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(raw)
    assert not is_index(path)
    assert "not a corpus index" in refused(path)


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none")
    assert "cannot read" in refused(tmp_path)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_named(tmp_path: Path, version: int) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + struct.pack("<I", version) + raw[12:])
    assert f"version {version}" in refused(path)


@pytest.mark.parametrize(
    "fields",
    [
        *({"num_tokens": lie} for lie in (0, -11, 10, 12, 2**31, 2**64, 11.0, "11", None, [11])),
        *({name: "absent"} for name in ("num_tokens", "sha256", "vocabulary")),
        *({"sha256": lie} for lie in ("", "0" * 64, 1, None)),
        *({"vocabulary": lie} for lie in (1, None, ["a" * 64])),
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(with_fields(raw))
    open_index(path, VOCABULARY)  # the rewriting itself is sound
    path.write_bytes(with_fields(raw, **fields))
    assert "damaged" in refused(path)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 60_000])
def test_a_header_of_another_kind_is_refused(tmp_path: Path, header: bytes) -> None:
    path = built(tmp_path)
    path.write_bytes(with_header(path.read_bytes(), header))
    assert "header" in refused(path)


def test_a_header_is_not_read_however_long_it_is(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = path.read_bytes()
    header = raw[PREAMBLE_BYTES : data_offset(raw)]
    path.write_bytes(with_header(raw, header.ljust(1 << 16)))
    open_index(path, VOCABULARY)
    path.write_bytes(with_header(raw, header.ljust((1 << 16) + 1)))
    assert "header is too long" in refused(path)


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    raw = with_fields(path.read_bytes(), num_tokens=0, sha256=hashlib.sha256().hexdigest())
    path.write_bytes(raw[: data_offset(raw)])
    assert "damaged" in refused(path)


def test_an_index_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path)
    path.write_bytes(with_fields(path.read_bytes(), vocabulary="b" * 64))
    line = refused(path, UsageError)
    assert "tokenizer of another model" in line and "Give the texts" in line


@given(choice=st.data())
def test_damage_to_data_too_large_to_check_costs_draft_tokens_only(
    tmp_path_factory: Any, choice: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("index") / "docs.corpus"
    build_index(DOCUMENTS, VOCABULARY, path)
    raw = bytearray(path.read_bytes())
    offset = data_offset(bytes(raw))
    for _ in range(choice.draw(st.integers(1, 8))):
        place = choice.draw(st.integers(offset, len(raw) - 1))
        raw[place] = choice.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_file, "CHECKED_BYTES", 0)
        index = open_index(path, VOCABULARY)
    for text in ([1, 2], [5, 1], [3], [9], []):
        for token, match in index.following(index.match(text)):
            assert 0 <= token < VOCABULARY.size
            assert 0 <= match.low < match.high <= index.num_tokens


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

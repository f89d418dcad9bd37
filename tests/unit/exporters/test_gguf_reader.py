"""Bounds on what is read of a GGUF file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edge_spec.errors import ModelFileError
from edge_spec.exporters import gguf_reader
from edge_spec.exporters.gguf_reader import GgufFile

TEXT = 8  # GGUF's number of the type


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def listed(*raw: bytes) -> bytes:
    """A file whose only pair is an array of these texts as they are stored."""
    array = struct.pack("<IIQ", 9, TEXT, len(raw)) + b"".join(raw)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + array


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (struct.pack("<Q", 2) + b"\xc3\x28", "text that is not UTF-8"),
        (struct.pack("<Q", 1 << 60) + b"x", "more bytes expected"),
        (struct.pack("<Q", 100) + b"x", "100 more bytes expected, 1 left"),
        (b"xxx", "8 more bytes expected, 3 left"),
    ],
)
def test_a_damaged_text_in_a_list_is_told_with_its_place(
    tmp_path: Path, broken: bytes, why: str
) -> None:
    whole = [text("a long one"), text("\u00e9"), text("")]
    path = tmp_path / "model.gguf"
    path.write_bytes(listed(*whole))
    assert GgufFile(path).metadata == {"key": ["a long one", "\u00e9", ""]}
    path.write_bytes(listed(*whole, broken))
    at = len(listed(*whole))
    with pytest.raises(ModelFileError, match=why) as caught:
        GgufFile(path)
    told = int(str(caught.value).partition("at byte ")[2].partition(" ")[0])
    assert at <= told <= at + len(broken)


PAIRS = [text(f"key{n}") + struct.pack("<I", TEXT) + text("x" * 1000) for n in range(4)]


@pytest.mark.parametrize(
    ("header", "metadata"),
    [
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, len(PAIRS)) + b"".join(PAIRS),
            {f"key{n}": "x" * 1000 for n in range(4)},
        ),
        (listed(text("a"), text("b")), {"key": ["a", "b"]}),
    ],
)
def test_a_header_has_a_bound_however_large_the_file_is(
    header: bytes,
    metadata: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a header is in memory, in several times its size."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header + bytes(1000))
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", len(header))
    assert GgufFile(path).metadata == metadata
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", len(header) - 1)
    with pytest.raises(ModelFileError, match="a header of more than"):
        GgufFile(path)


def test_a_digest_is_of_the_pairs_that_are_named_wherever_they_stand(tmp_path: Path) -> None:
    def pair(key: str, value: str) -> bytes:
        return text(key) + struct.pack("<I", TEXT) + text(value)

    def digest(*pairs: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
        return GgufFile(path).digest(["b", "a", "missing"])

    a, b = pair("a", "1"), pair("b", "2")
    assert digest(a, b) == digest(b, pair("c", "3"), a)
    others = [digest(a), digest(a, pair("b", "3")), digest(pair("a", "1b"), pair("b", ""))]
    assert len({digest(a, b), *others}) == 4


@pytest.mark.parametrize("number", [31, 36, 144, 999])
def test_a_type_of_another_program_is_refused(tmp_path: Path, number: int) -> None:
    described = text("output.weight") + struct.pack("<IQIQ", 1, 256, number, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + described + bytes(4096))
    with pytest.raises(
        ModelFileError, match=rf"output\.weight.* the unknown type {number}: .*ik_llama\.cpp"
    ) as caught:
        GgufFile(path)
    assert caught.value.remedy is not None
    assert "download another quantization" in caught.value.remedy

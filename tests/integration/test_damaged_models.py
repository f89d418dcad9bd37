"""Damaged and hostile model files: one line that names the file, never another exception."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError

HUGE = 2**60
U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10

Files = Callable[..., Path]
Refusal = Callable[..., EdgeSpecError]
pytestmark = pytest.mark.usefixtures("bounded_memory")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_pairs)


def pair(kind: int, value: bytes, key: str | bytes = "a.key") -> bytes:
    return header(num_pairs=1) + text(key) + struct.pack("<I", kind) + value + bytes(64)


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, repeat: int = 1) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    one = text("t") + dims + struct.pack("<IQ", kind, offset)
    return header(num_tensors=repeat) + one * repeat + bytes(128)


def alignment(kind: int, value: bytes) -> bytes:
    return pair(kind, value, "general.alignment")


BAD_GGUF = {
    "empty": (b"", "cannot read"),
    "shorter than its magic": (b"GG", "4 more bytes expected"),
    "a zip file": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "version 50331648"),
    "no counts": (header()[:10], "more bytes expected"),
    "too many tensors": (header(num_tensors=HUGE), "cannot fit"),
    "too many pairs": (header(num_pairs=HUGE), "cannot fit"),
    "huge key": (header(num_pairs=1) + struct.pack("<Q", HUGE) + bytes(64), f"{HUGE} more bytes"),
    "huge string": (pair(STRING, struct.pack("<Q", 2**63)), f"{2**63} more bytes"),
    "huge array": (pair(ARRAY, array(U64, HUGE)), "more bytes expected"),
    "huge array of bytes": (pair(ARRAY, array(U8, HUGE)), "more bytes expected"),
    "huge array of strings": (pair(ARRAY, array(STRING, HUGE)), "an array of"),
    "huge array of arrays": (pair(ARRAY, array(ARRAY, HUGE)), "an array of"),
    "nested arrays": (pair(ARRAY, array(ARRAY, 1) * 20), "metadata type"),
    "unknown type": (pair(13, b""), "metadata type 13"),
    "array of an unknown type": (pair(ARRAY, array(99, 1)), "metadata type 99"),
    "text not UTF-8": (pair(U8, b"\0", key=b"\xff\xfe"), "not UTF-8"),
    "alignment 0": (alignment(U32, struct.pack("<I", 0)), "alignment 0"),
    "alignment 48": (alignment(U32, struct.pack("<I", 48)), "alignment 48"),
    "alignment a text": (alignment(STRING, text("x")), "alignment 'x'"),
    "one part of several": (pair(U32, struct.pack("<I", 3), "split.count"), "one of the 3 parts"),
    "no dimensions": (tensor(()), "0 dimensions"),
    "five dimensions": (tensor((1,) * 5), "5 dimensions"),
    "a dimension of 0": (tensor((4, 0)), "the shape [0, 4]"),
    "a huge dimension": (tensor((4, 2**63)), "the shape"),
    "a huge product": (tensor((512, 512, 512, 512)), "beyond the end"),
    "an unknown tensor type": (tensor((4,), kind=200), "unknown type 200"),
    "an offset beyond the file": (tensor((4,), offset=HUGE), "beyond the end"),
    "an offset that wraps": (tensor((4,), offset=2**64 - 8), "beyond the end"),
    "a row that is no multiple of a block": (tensor((33,), kind=2), "not a multiple of 32"),
    "two tensors of one name": (tensor((4,), repeat=2), "two tensors named t"),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_a_file_that_is_no_gguf_is_refused(case: str, tmp_path: Path, refusal: Refusal) -> None:
    data, expected = BAD_GGUF[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    error = refusal(path)
    assert isinstance(error, ModelFileError)
    assert expected in str(error)


@pytest.mark.parametrize(("tensors", "pairs"), [(200_000, 0), (0, 200_000)])
def test_more_than_any_model_has_is_refused_unread(
    tensors: int, pairs: int, tmp_path: Path, refusal: Refusal
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(tensors, pairs))
    with path.open("r+b") as file:
        file.truncate(64 * (tensors + pairs))  # takes no space
    assert f"{tensors} tensors and {pairs} metadata pairs, expected" in str(refusal(path))


@pytest.mark.parametrize(
    ("value", "size", "expected"),
    [
        (array(U8, 300_000_000), 400_000_000, "a header of more than 256 MB"),
        (array(STRING, 4_000_001), 64_000_000, "arrays of more than 4000000 items"),
    ],
    ids=["bytes", "texts"],
)
def test_a_header_that_would_take_the_memory_is_refused(
    value: bytes, size: int, expected: str, tmp_path: Path, refusal: Refusal
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(pair(ARRAY, value))
    with path.open("r+b") as file:
        file.truncate(size)  # takes no space
    assert expected in str(refusal(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_a_pipe_is_refused_unopened(tmp_path: Path, refusal: Refusal) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    assert "no regular file" in str(refusal(tmp_path / "model.gguf"))


def test_a_path_without_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    assert "no such file" in str(refusal(tmp_path / "none.gguf"))


def truncated(path: Path) -> Iterator[bytes]:
    """About 200 beginnings, most of them within the header. The last 32 bytes may be padding."""
    data = path.read_bytes()
    for length in [*range(0, 9000, 61), *range(9000, len(data) - 32, len(data) // 50)]:
        yield data[:length]


def test_a_gguf_file_cut_anywhere_is_refused(gguf: Files, tmp_path: Path, refusal: Refusal) -> None:
    cut = tmp_path / "cut.gguf"
    for data in truncated(gguf("llama")):
        cut.write_bytes(data)
        assert isinstance(refusal(cut), ModelFileError)


def test_a_safetensors_file_cut_anywhere_is_refused(
    tiny: ModuleType, tmp_path: Path, hf: Files, refusal: Refusal
) -> None:
    directory = tiny.write_hf(tiny.build(), tmp_path / "model")
    for data in truncated(hf("llama") / "model.safetensors"):
        (directory / "model.safetensors").write_bytes(data)
        assert isinstance(refusal(directory, "model.safetensors"), ModelFileError)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_random_damage_is_refused_or_harmless(
    form: str,
    seed: int,
    tiny: ModuleType,
    damage: ModuleType,
    tmp_path: Path,
    read: Callable[[Path], None],
) -> None:
    """50 files a seed. Only the library's own errors may come out."""
    random = np.random.RandomState(seed)
    model = tiny.build(("llama-bias", "qwen3", "llama-llama3")[seed % 3])
    if form == "gguf":
        path = file = tiny.write_gguf(model, tmp_path / "model.gguf")
        header_bytes = file.read_bytes().index(b"blk.1.ffn_down.weight") + 64
    else:
        path = tiny.write_hf(model, tmp_path / "model")
        file = path / "model.safetensors"
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    data = file.read_bytes()
    num_refused = 0
    for round in range(50):
        file.write_bytes(damage.mutated(data, random, header_bytes))
        try:
            read(path)
        except EdgeSpecError as error:
            num_refused += 1
            assert "\n" not in str(error), f"round {round}"
            assert len(str(error)) < 1000, f"round {round}"
        except Exception as error:
            raise AssertionError(f"round {round} of seed {seed}: {error!r}") from error
    assert 10 < num_refused < 50  # or the damage is too slight or too coarse to tell


def test_the_names_of_a_damaged_file_are_cut_in_its_message(
    tiny: ModuleType, tmp_path: Path, refusal: Refusal
) -> None:
    for key in ("general__architecture", "llama__rope__scaling__type"):
        path = tmp_path / "model.gguf"
        tiny.write_gguf(tiny.build(), path, **{key: "x" * 100_000})
        assert isinstance(refusal(path), UnsupportedModelError)

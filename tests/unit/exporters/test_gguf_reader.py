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
    return struct.pack("<Q", len(value)) + value.encode()


def test_a_header_has_a_bound_however_large_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a header is in memory, in several times its size."""
    pairs = [text(f"key{n}") + struct.pack("<I", TEXT) + text("x" * 1000) for n in range(4)]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)
    path = tmp_path / "model.gguf"
    path.write_bytes(header + bytes(1000))
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", len(header))
    assert len(GgufFile(path).metadata) == 4
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", len(header) - 1)
    with pytest.raises(ModelFileError, match="a header of more than"):
        GgufFile(path)

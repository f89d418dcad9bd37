"""What a model's makers state of sampling goes with it: through every export, to who answers."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.recommended_sampling import DEFAULT_SAMPLING
from edge_spec.core.sampling import SamplingParams
from edge_spec.exporters.gguf_model_info import open_model_info
from edge_spec.exporters.hf_source import open_directory
from edge_spec.loader import load
from edge_spec.models.bundle import open_bundle
from edge_spec.models.model_text import text_of_bundle
from edge_spec.models.runtimes import load_exporter
from fixtures.silence import quiet

STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
PARAMS = SamplingParams(0.6, 20, 0.95, 0.01, 1.1)
UNCHECKED = ExportOptions(check=False)


@pytest.fixture
def directory(tiny: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """directory(**generation): a model with this generation_config.json."""

    def write(**generation: Any) -> Path:
        path = Path(tiny.write_hf(tiny.build(), tmp_path / "model"))
        tiny.write_json(path / "generation_config.json", generation)
        return path

    return write


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, DEFAULT_SAMPLING),
        ({"do_sample": True} | STATED, PARAMS),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingParams(0.6, top_p=0.9)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(1.0)),
        ({"do_sample": "maybe", "top_k": None}, DEFAULT_SAMPLING),
    ],
)
def test_a_directory_states_it(
    directory: Callable[..., Path], generation: Any, expected: SamplingParams
) -> None:
    assert open_directory(directory(**generation)).sampling.with_asked({}) == expected


@pytest.mark.parametrize("format", ["onnx", "gguf"])
def test_an_export_carries_it(directory: Callable[..., Path], tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    checkpoint = open_directory(directory(**STATED))
    load_exporter(format).export(checkpoint, out, UNCHECKED, quiet)
    if format == "gguf":
        assert open_model_info(out).sampling.with_asked({}) == PARAMS
        again = tmp_path / "again"  # a GGUF file of a GGUF file
        load_exporter(format).export(open_model_info(out), again, UNCHECKED, quiet)
        assert open_model_info(again).sampling.with_asked({}) == PARAMS
    else:
        assert text_of_bundle(open_bundle(out)).sampling.with_asked({}) == PARAMS


def with_metadata(path: Path, out: Path, **values: tuple[int, bytes]) -> Path:
    """Writes the GGUF file with more metadata, each of a type and its bytes, before all other."""
    whole = path.read_bytes()
    pairs = struct.unpack("<Q", whole[16:24])[0] + len(values)
    added = b""
    for key, (kind, content) in values.items():
        name = f"general.sampling.{key}".encode()
        added += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + content
    added += _filler(-len(added) % 32)
    pairs += 1
    out.write_bytes(whole[:16] + struct.pack("<Q", pairs) + added + whole[24:])
    return out


def _filler(missing: int) -> bytes:
    """A pair that keeps what comes after it at multiples of 32 bytes, where tensors have to be."""
    length = 8 + 1 + 4 + 8  # key's length, key, type, text's length
    text = b" " * ((missing - length) % 32)
    return struct.pack("<Q", 1) + b"x" + struct.pack("<I", 8) + struct.pack("<Q", len(text)) + text


FLOAT, TEXT, INT, BOOL = 6, 8, 5, 7


@pytest.mark.parametrize(
    ("key", "kind", "content", "told"),
    [
        ("temp", FLOAT, struct.pack("<f", float("nan")), "temperature nan"),
        ("temp", FLOAT, struct.pack("<f", -1.0), "temperature -1.0"),
        ("top_p", FLOAT, struct.pack("<f", 2.0), "top-p 2.0"),
        ("top_k", INT, struct.pack("<i", -5), "top-k -5"),
        ("min_p", TEXT, struct.pack("<Q", 4) + b"many", "min-p 'many'"),
        ("temp", 12, struct.pack("<d", 1e300), "temperature 1e+300"),
        ("temp", BOOL, b"\x01", "temperature True"),
    ],
)
def test_what_is_no_use_in_a_gguf_file_is_one_warning(
    gguf: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: str,
    kind: int,
    content: bytes,
    told: str,
) -> None:
    path = with_metadata(gguf(), tmp_path / "bad.gguf", **{key: (kind, content)})
    with load(str(path), runtime="reference", context_length=64) as engine:
        assert not caplog.records  # who does not ask is not bothered
        with caplog.at_level(logging.WARNING):
            assert engine.chat_sampling() == DEFAULT_SAMPLING
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert told in caplog.text


def test_an_engine_tells_it_and_stays_greedy_unless_it_is_given(
    directory: Callable[..., Path],
) -> None:
    with load(str(directory(**STATED)), runtime="reference", context_length=64) as engine:
        assert engine.chat_sampling() == PARAMS
        assert engine.chat_sampling(temperature=0.0) == SamplingParams()
        texts = {engine.chat("hello", max_tokens=16).text for _ in range(3)}
        assert len(texts) == 1

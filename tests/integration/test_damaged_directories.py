"""Hugging Face directories with missing, damaged or hostile files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError
from edge_spec.exporters import stored_tensor

Refusal = Callable[..., EdgeSpecError]
pytestmark = pytest.mark.usefixtures("bounded_memory")


@pytest.fixture
def directory(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.write_hf(tiny.build(), tmp_path / "model"))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_one_of_its_files_names_it(
    file: str, directory: Path, refusal: Refusal
) -> None:
    (directory / file).unlink()
    assert isinstance(refusal(directory, file), ModelFileError)


def test_weights_of_another_name_are_not_read_as_the_models(
    directory: Path, refusal: Refusal
) -> None:
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    assert isinstance(refusal(directory, "model.safetensors"), ModelFileError)


def test_pickled_weights_are_refused_with_what_converts_them(
    directory: Path, refusal: Refusal
) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    error = refusal(directory, "pickled")
    assert isinstance(error, UnsupportedModelError) and "safetensors.torch" in error.remedy


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_names_its_file(
    file: str, content: bytes, directory: Path, refusal: Refusal
) -> None:
    (directory / file).write_bytes(content)
    assert isinstance(refusal(directory, file), ModelFileError)


def test_a_chat_template_of_another_kind_is_refused_or_left_out(
    directory: Path, refusal: Refusal, read: Callable[[Path], None]
) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": ["one", "two"]}))
    try:
        read(directory)
    except ModelFileError:
        refusal(directory, file.name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize(
    "file",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_a_file_without_end_is_refused_unread(
    file: str, kind: str, directory: Path, refusal: Refusal
) -> None:
    (directory / file).unlink(missing_ok=True)
    if kind == "device":
        (directory / file).symlink_to("/dev/zero")
    else:
        os.mkfifo(directory / file)
    error = refusal(directory, file)
    assert isinstance(error, ModelFileError) and "no regular file" in str(error)


def test_links_to_files_are_followed(directory: Path, read: Callable[[Path], None]) -> None:
    """Caches of the hub consist of them."""
    for number, file in enumerate(list(directory.iterdir())):
        file.symlink_to(file.rename(directory.parent / f"blob-{number}"))
    read(directory)


def test_counts_of_thousands_of_digits_are_refused(
    directory: Path, tiny: ModuleType, refusal: Refusal
) -> None:
    config = json.loads((directory / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    config |= dict.fromkeys(names, 10**4200)
    tiny.write_json(directory / "config.json", config)
    assert isinstance(refusal(directory, str(directory)), ModelFileError)


def entry(shape: Any = (4,), dtype: str = "F32", offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_SAFETENSORS = {
    "a list": [],
    "an entry that is none": {"t": 1},
    "no shape": {"t": {"dtype": "F32", "data_offsets": [0, 16]}},
    "a shape in words": {"t": entry("wide")},
    "an endless shape": {"t": entry([float("inf")])},
    "endless offsets": {"t": entry(offsets=[0, float("inf")])},
    "a scalar": {"t": entry([], offsets=[0, 4])},
    "a negative dimension": {"t": entry([-2, -2])},
    "a huge dimension": {"t": entry([2**62])},
    "many dimensions": {"t": entry([1] * 8 + [4])},
    "one offset": {"t": entry(offsets=[0])},
    "reversed offsets": {"t": entry(offsets=[16, 0])},
    "offsets before the data": {"t": entry(offsets=[-16, 0])},
    "offsets beyond the data": {"t": entry(offsets=[16, 32])},
    "offsets of another size": {"t": entry(offsets=[0, 12])},
    "an unsupported type": {"t": entry(dtype="F8_E4M3", shape=[16])},
    "overlapping tensors": {"t": entry(), "u": entry()},
    "data of no tensor": {"t": entry([2], offsets=[0, 8])},
}


@pytest.mark.parametrize("case", BAD_SAFETENSORS)
def test_a_damaged_safetensors_header_is_refused(
    case: str, directory: Path, tiny: ModuleType, refusal: Refusal
) -> None:
    data = tiny.safetensors_file(BAD_SAFETENSORS[case], bytes(16))
    (directory / "model.safetensors").write_bytes(data)
    refusal(directory, "model.safetensors")


def test_dimensions_of_thousands_of_digits_are_not_multiplied(
    directory: Path, tiny: ModuleType, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would take a minute."""
    monkeypatch.setattr(stored_tensor, "math", SimpleNamespace())
    for shape in ([10**4290] * 1000, [10**4290] * 8):
        data = tiny.safetensors_file({"t": entry(shape)}, bytes(16))
        (directory / "model.safetensors").write_bytes(data)
        assert isinstance(refusal(directory, "model.safetensors"), ModelFileError)


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", bytes(8), (2**63).to_bytes(8, "little") + b"{}", b"\x10" + bytes(30)],
    ids=["empty", "short", "no header", "a huge header", "a header that is no JSON"],
)
def test_a_file_that_is_no_safetensors_is_refused(
    data: bytes, directory: Path, refusal: Refusal
) -> None:
    (directory / "model.safetensors").write_bytes(data)
    assert isinstance(refusal(directory, "model.safetensors"), ModelFileError)


def test_a_header_nested_without_end_is_refused(directory: Path, refusal: Refusal) -> None:
    header = b"[" * 200_000
    data = len(header).to_bytes(8, "little") + header
    (directory / "model.safetensors").write_bytes(data)
    refusal(directory, "model.safetensors")


@pytest.mark.parametrize(
    "weight_map",
    [
        {"t": "../other/model.safetensors"},
        {"t": "/etc/passwd"},
        {"t": ".."},
        {"t": ""},
        {"t": "missing.safetensors"},
        {"t": 5},
        {"t": ["model.safetensors"], "u": "model.safetensors"},
        {},
        None,
        "model.safetensors",
    ],
    ids=str,
)
def test_an_index_of_other_files_is_refused(
    weight_map: Any, directory: Path, refusal: Refusal
) -> None:
    outside = directory.parent / "other"
    outside.mkdir()
    (outside / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert isinstance(refusal(directory, str(directory)), ModelFileError)

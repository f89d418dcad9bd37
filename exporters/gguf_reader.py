"""A bounded reader of GGUF files (ggml's docs/gguf.md): metadata and memory-mapped tensors.

`gguf.GGUFReader` builds a numpy object per array element (5 s for a 49k vocabulary) and trusts the
file's counts. This reader takes one pass and checks counts and offsets before it allocates.
"""

from __future__ import annotations

import hashlib
import mmap
import reprlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.stored_tensor import StoredTensor, damaged
from edge_spec.models.bundle import regular_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Takes several times as much memory. Large vocabularies (260,000 tokens, 510,000 merges) have 15
# MB.
MAX_HEADER_BYTES = 256_000_000
MAX_TENSORS = 100_000
MAX_PAIRS = 100_000
MAX_ITEMS = 4_000_000  # strings, and arrays in arrays
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 2
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class GgufFile:
    """Metadata and tensors of a GGUF file, mapped read-only. Raises ModelFileError unless it is
    complete and consistent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = _map(path)
        except FileNotFoundError:
            raise ModelFileError(f"no such file: {path}", remedy="Check the path.") from None
        except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
            raise ModelFileError(
                f"cannot read {path}: {error}", remedy="Expected a GGUF file."
            ) from None
        header = _Header(self._map, path)
        header.read()
        self.metadata: dict[str, Any] = header.metadata
        self.kinds = header.kinds  # GGUFValueType of each metadata value
        self.tensors: dict[str, StoredTensor] = header.tensors
        self._spans = header.spans
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ModelFileError(
                f"{path} is one of the {reprlib.repr(parts)} parts of a model",
                remedy="Join them with llama-gguf-split --merge.",
            )

    def digest(self, keys: Iterable[str]) -> str:
        """Return the SHA-256 of these metadata pairs as stored, in any order. Missing keys are
        ignored."""
        spans = (self._spans[key] for key in sorted(keys) if key in self._spans)
        joined = hashlib.sha256()
        for start, end in spans:
            joined.update(self._map[start:end])
        return joined.hexdigest()


_open_files: WeakValueDictionary[tuple[object, ...], GgufFile] = WeakValueDictionary()


def open_gguf_file(path: Path) -> GgufFile:
    """Return a `GgufFile`, an open one if the file is unchanged: reading a large vocabulary takes
    half a second. Raises as GgufFile."""
    try:
        stat = path.stat()
    except OSError:
        return GgufFile(path)
    key = (path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    found = _open_files.get(key)
    if found is None:
        found = _open_files[key] = GgufFile(path)
    return found


def _map(path: Path) -> mmap.mmap:
    """Raises OSError, and ValueError for an empty file."""
    regular_size(path)  # opening a pipe would block
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def first_architecture(path: Path) -> str | None:
    """Return the architecture if it is the first metadata entry, as usual."""
    try:
        with _map(path) as mapped:
            header = _Header(mapped, path)
            if header.num_pairs and header.string() == "general.architecture":
                return header.string() if header.scalar("I") == _STRING else None
    except (ModelFileError, OSError, ValueError):
        pass
    return None


class _Header:
    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.at = 0
        self.num_items = 0
        magic = self.take(4)
        if magic != MAGIC:
            raise ModelFileError(
                f"{path} is not a GGUF file (it begins with {magic!r}, expected {MAGIC!r})",
                remedy="Give a .gguf file, a Hugging Face directory or a bundle directory.",
            )
        version = self.scalar("I")
        if version not in VERSIONS:
            self.fail(f"GGUF version {version}; versions {VERSIONS} are supported")
        self.num_tensors, self.num_pairs = self.scalar("Q"), self.scalar("Q")
        num_tensors, num_pairs = self.num_tensors, self.num_pairs
        # A pair takes at least 13 bytes, a tensor's entry 32.
        if num_pairs * 13 + num_tensors * 32 > self.size:
            self.fail(f"{num_tensors} tensors and {num_pairs} metadata pairs cannot fit")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            self.fail(
                f"{num_tensors} tensors and {num_pairs} metadata pairs, expected {MAX_TENSORS} and "
                f"{MAX_PAIRS} at most"
            )
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        self.spans: dict[str, tuple[int, int]] = {}  # start and end of each pair
        self.tensors: dict[str, StoredTensor] = {}

    def read(self) -> None:
        for _ in range(self.num_pairs):
            start, key = self.at, self.string()
            self.kinds[key] = self.scalar("I")
            self.metadata[key] = self.value(self.kinds[key])
            self.spans[key] = start, self.at
        self._read_tensors()

    def fail(self, what: str) -> None:
        raise damaged(f"{self.path} is damaged at byte {self.at} of {self.size}: {what}")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.at:
            self.fail(f"{num_bytes} more bytes expected, {self.size - self.at} left")
        if num_bytes > self.end - self.at:
            self.fail(f"a header of more than {MAX_HEADER_BYTES // 10**6} MB")
        taken = self.buffer[self.at : self.at + num_bytes]
        self.at += num_bytes
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail("text that is not UTF-8")
            raise

    def strings(self, count: int) -> list[str]:
        """Read faster than `string`: vocabularies have 262,144."""
        texts: list[str] = []
        buffer, end, at = self.buffer, self.end, self.at
        size_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            self.at = at
            if at + 8 > end or (after := at + 8 + size_at(buffer, at)[0]) > end:
                return [*texts, self.string()]  # raises the right error
            try:
                texts.append(str(buffer[at + 8 : after], "utf-8"))
            except UnicodeDecodeError:
                return [*texts, self.string()]
            at = after
        self.at = at
        return texts

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == MAX_ARRAY_DEPTH:
            self.fail(f"unknown metadata type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = np.dtype(np.bool_ if item == _BOOL else "<" + _SCALARS[item])
            return np.frombuffer(self.take(count * code.itemsize), code).copy()
        if count * 8 > self.size - self.at:  # each item takes at least 8 bytes
            self.fail(f"an array of {count} items")
        self.num_items += count
        if self.num_items > MAX_ITEMS:
            self.fail(f"arrays of more than {MAX_ITEMS} items")
        if item == _STRING:
            return self.strings(count)
        return [self.value(item, depth + 1) for _ in range(count)]

    def _read_tensors(self) -> None:
        described = [self._describe() for _ in range(self.num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"alignment {alignment!r}")
        start = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in described:
            if name in self.tensors:
                self.fail(f"two tensors named {name}")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                self.fail(f"tensor {name} has rows of {shape[-1]}, not a multiple of {block}")
            stored = (*shape[:-1], shape[-1] // block * block_bytes)
            num_bytes = int(np.prod(stored, dtype=object))
            if start + offset + num_bytes > self.size:
                self.fail(f"tensor {name} ends beyond the end of the file")
            data = np.frombuffer(self.buffer, np.uint8, num_bytes, start + offset)
            self.tensors[name] = StoredTensor(shape, kind, data.reshape(stored))

    def _describe(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dims = self.string(), self.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        if not all(1 <= dim <= self.size * 8 for dim in shape):
            self.fail(f"tensor {name} has the shape {list(shape)}")
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError:
            raise ModelFileError(
                f"{self.path}: tensor {reprlib.repr(name)} has the unknown type {kind}: the file "
                "is of a newer version of llama.cpp or of another program, such as ik_llama.cpp "
                "or bitnet.cpp, or is damaged",
                remedy="Update edge-spec, or download another quantization, such as Q4_K_M.",
            ) from None


class Metadata:
    """Typed look-ups whose errors name the file."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        """prefix: of all keys."""
        self.values = values
        self.path = path
        self._prefix = prefix

    def get(self, key: str, kind: type) -> Any:
        """Return the value or None. Raises ModelFileError for another type."""
        key = self._prefix + key
        value = self.values.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        is_number = kind is not int or not isinstance(value, bool)
        if value is not None and not (isinstance(value, kind) and is_number):
            raise damaged(
                f"{self.path}: {_cut(key)} is {reprlib.repr(value)}, expected {kind.__name__}"
            )
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise damaged(f"{self.path} lacks {_cut(self._prefix + key)}")
        return value


def _cut(key: str) -> str:
    """Shorten a key: its architecture may be any text."""
    return key if len(key) < 80 else reprlib.repr(key)


# By general.type (ggml's docs/gguf.md), or by general.architecture in older files.
_OTHER_KINDS = {
    "adapter": ("a LoRA adapter", "Merge it into its model, and give that."),
    "mmproj": ("the part of a model that reads pictures", "Give the file of its text model."),
    "clip": ("the part of a model that reads pictures", "Give the file of its text model."),
    "imatrix": ("an importance matrix", "Give the model that it was measured on."),
}


def require_language_model(file: GgufFile) -> None:
    """Raises UnsupportedModelError for adapters, parts of models, and embedding models."""
    architecture = file.metadata.get("general.architecture")
    kinds = (file.metadata.get("general.type"), architecture)
    known = (_OTHER_KINDS[kind] for kind in kinds if isinstance(kind, str) and kind in _OTHER_KINDS)
    found = next(known, None)
    if found is None and _embeds(file, architecture):
        found = ("a model that embeds text", "Give a model that writes text.")
    if found is not None:
        what, remedy = found
        raise UnsupportedModelError(f"{file.path} is {what}, not one that writes", remedy=remedy)


def _embeds(file: GgufFile, architecture: object) -> bool:
    """Return whether attention is not causal or a text's rows are pooled into one."""
    is_causal = file.metadata.get(f"{architecture}.attention.causal")
    pooling = file.metadata.get(f"{architecture}.pooling_type")
    return is_causal is False or (isinstance(pooling, int) and pooling > 0)


EAGLE3, DFLASH, ASSISTANT = "eagle3", "dflash", "gemma4-assistant"
HEAD_ARCHITECTURES = (EAGLE3, DFLASH, ASSISTANT)


def no_model(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a trained head, which is no model of its own",
        remedy="Name the model that it was trained for, and the head as its --draft.",
    )


def main_layers(metadata: Metadata) -> int | None:
    """Return the number of layers before a file's MTP layers; None without any. Raises
    ModelFileError for impossible counts."""
    architecture = metadata.require("general.architecture", str)
    count = metadata.get(f"{architecture}.nextn_predict_layers", int) or 0
    layers = metadata.require(f"{architecture}.block_count", int) if count else 0
    if count and not 0 < count < layers:
        raise damaged(
            f"{metadata.path} states {count} layers for multi-token prediction among {layers}"
        )
    return layers - count if count else None


def is_only_mtp(names: Iterable[str]) -> bool:
    """Return whether a file has only MTP layers (llama.cpp's converter with --mtp)."""
    return not any(name.startswith("blk.0.") for name in names)

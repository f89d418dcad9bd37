"""Checks what an export is asked for, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_spec.core.export import ExportOptions
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models.bundle import may_replace, require_readable

BLOCK_SIZES = (32, 64, 128)  # of ONNX bundles; the first is the default


@dataclass(frozen=True)
class BlockQuantization:
    """One way to store the weights, and the farthest it may be from the source.

    The bounds are several times what the demo model measures (docs/benchmarks.md): they stop
    broken exports, not lossy formats.
    """

    bits: int
    max_kl_divergence: float  # nats


def chosen_quantization(options: ExportOptions, known: Iterable[str]) -> str:
    """The first of `known` where none is asked for. Raises UsageError for another one."""
    names = list(known)
    name = names[0] if options.quantization is None else options.quantization
    if name not in names:
        raise UsageError(
            f"unknown quantization {name!r}", remedy=f"Choose one of {', '.join(names)}."
        )
    return name


def chosen_block_size(options: ExportOptions) -> int:
    """Raises UsageError for one that is not in BLOCK_SIZES."""
    block_size = BLOCK_SIZES[0] if options.block_size is None else options.block_size
    if block_size not in BLOCK_SIZES:
        raise UsageError(
            f"block size {block_size}", remedy=f"Choose one of {', '.join(map(str, BLOCK_SIZES))}."
        )
    return block_size


def require_replaceable(out: Path) -> None:
    """Raises UsageError where a bundle at `out` would take the place of something else, or could
    not be opened there."""
    require_readable(out)
    if out.exists() and not may_replace(out):
        raise UsageError(
            f"{out} exists and is not a bundle", remedy="Choose an empty or new directory."
        )


def require_plain(checkpoint: StoredCheckpoint, writer: str, remedy: str) -> None:
    """Raises UnsupportedModelError for what Llama does not have, which not every writer writes."""
    features = checkpoint.config.features()
    if features:
        named = ", ".join(name.replace("_", " ") for name in features)
        raise UnsupportedModelError(
            f"{checkpoint.path}: the {writer} exporter does not write its {named}", remedy=remedy
        )


@contextmanager
def require_unchanged(path: Path) -> Iterator[None]:
    """Raises ModelFileError where a model's file, or one in its directory, changes meanwhile."""
    before = _stats(path)
    yield
    if _stats(path) != before:
        raise ModelFileError(
            f"{path} changed while it was read", remedy="Export it again once it is complete."
        )


def _stats(path: Path) -> list[tuple[str | int, ...]]:
    """Returns what changes with each file: not its content alone, but nothing that changes where
    nobody touches the file."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [
        (name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
    ]

"""What all exporters do: they check what is asked for before anything is written, and write
what a bundle says of itself.

`export` raises UsageError for unknown options and where `out` must not be replaced,
UnsupportedModelError for a model that cannot be written, ExportError beyond the quantization's
bound; then, or when interrupted, `out` is left as it was.

Some write graphs whose shapes are fixed, as NPUs and Core ML want them, in one layout. A program
has one function for each number of rows, all of the same weights.

Inputs, outputs and states (rows: of the function, padding included; slots: of the cache):

    input_ids     [1, rows] int32
    position_ids  [rows] int32              committed tokens + depth in the tree; 0 for padding
    write_slot    [1] int32                 keys and values of row i go to slot write_slot + i
    mask          [1, 1, rows, slots]       0 where a row sees a slot, -30000 elsewhere
    logits        [rows, vocab]             or logits_0, logits_1, ... side by side
    hidden        [rows, hidden_size]       after the final norm: where it was asked for, and of
                                            functions that only prefill
    states        [..., kv_heads, slots, head_dim]

First the keys and values of all rows are written, then each row attends to the slots that its
mask leaves. Where a token stands in the cache is therefore independent of its position in the
text, and an accepted path of a tree can stay where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ExportReport, ScreeningExporter
from edge_spec.errors import UnsupportedModelError, UsageError, readable
from edge_spec.exporters.checkpoint import ModelText, StoredCheckpoint
from edge_spec.exporters.parity import Compare
from edge_spec.models.bundle import (
    TOKENIZER,
    Manifest,
    may_replace,
    open_bundle,
    require_readable,
    write_manifest,
)
from edge_spec.storage.atomic import sha256_file

OTHER_FORMAT = "Export it with --format onnx, or run it without --runtime."


@dataclass(frozen=True)
class BlockQuantization:
    """One way to store the weights, and the farthest it may be from the source.

    The bounds are several times what the demo model measures (docs/results.md): they stop
    broken exports, not lossy formats.
    """

    bits: int
    max_kl_divergence: float  # nats


def chosen_quantization(options: ExportOptions, known: Iterable[str], device: str = "") -> str:
    """Return the first of `known`, which are for a device or for all, where none is asked for.
    Raises UsageError for another one."""
    names = list(known)
    name = names[0] if options.quantization is None else options.quantization
    if name not in names:
        raise UsageError(
            f"unknown quantization {name!r}{f' for the {device}' if device else ''}",
            remedy=f"Choose one of {', '.join(names)}.",
        )
    return name


def check_request(
    exporter: ScreeningExporter,
    checkpoint: StoredCheckpoint,
    out: Path,
    options: ExportOptions,
    known: Iterable[str],
    *own_options: str,
    device: str = "",
) -> str:
    """Return the quantization, one of `known`, before anything is written. own_options: what the
    exporter knows beside those that all know. Raises UnsupportedModelError, UsageError."""
    options.require_only(exporter.format, *own_options)
    name = chosen_quantization(options, known, device)
    require_replaceable(out)
    exporter.require_exportable(checkpoint)
    return name


def require_replaceable(out: Path) -> None:
    """Raises UsageError where a bundle at `out` would take the place of something else, or could
    not be opened there."""
    require_readable(out)
    if out.exists() and not may_replace(out, Manifest):
        raise UsageError(
            f"{out} exists and is not a bundle", remedy="Choose an empty or new directory."
        )


def require_plain(checkpoint: StoredCheckpoint, writer: str) -> None:
    """Raises UnsupportedModelError for what Llama does not have, which not every writer writes."""
    features = checkpoint.config.features()
    if features:
        named = ", ".join(name.replace("_", " ") for name in features)
        raise UnsupportedModelError(
            f"{checkpoint.path}: the {writer} exporter does not write its {named}",
            remedy=OTHER_FORMAT,
        )


_TEXT = ("chat_template", "named_templates", "special_tokens", "eos_ids", "bos_id", "adds_bos")


def describe(
    work: Path,
    source: ModelText,
    config: ModelConfig,
    *,
    format: str,
    quantization: str,
    check: Compare | None,
    kv_cache: Literal["shared", "whole", "growing"] = "shared",
    notes: Sequence[str] = (),
) -> None:
    """Write tokenizer and manifest beside a converted model, once more with what `check` finds of
    the bundle. Raises what `check` raises."""
    path = source.path
    (work / TOKENIZER).write_text(source.tokenizer_json(), encoding="utf-8")
    described: dict[str, Any] = {
        "format": format,
        "name": readable(path.stem if path.is_file() else path.name),
        **{name: getattr(source, name) for name in _TEXT},
        "sampling": source.sampling.stated,
        "source_sha256": sha256_file(path) if path.is_file() else None,
        "architecture": config.to_dict(),
        "quantization": quantization,
        "kv_cache": kv_cache,
        "parity": {},
        "notes": notes,
    }
    manifest = write_manifest(work, **described)
    if check is not None:
        described["parity"] = check(open_bundle(work))._asdict()
        write_manifest(work, manifest.files, **described)


def report_bundle(out: Path, notes: tuple[str, ...] = ()) -> ExportReport:
    """Return what an exporter says of the bundle that it wrote. notes: beside the bundle's own."""
    bundle = open_bundle(out)
    manifest = bundle.manifest
    return ExportReport(out, bundle.num_bytes, manifest.parity, (*manifest.notes, *notes))


BLOCK_SIZE = 32  # weights that share a scale
_CONTEXT_TOKENS = 2048  # where none is asked for
SCORING_ROWS = (1, 4, 8)
PREFILL_ROWS = 64
MASKED = -30000.0  # what a mask adds where a row does not see a slot


class StaticFunction(NamedTuple):
    """Describes a function of `rows` rows, and whether it scores them."""

    name: str
    rows: int
    scores: bool


def functions(scoring_rows: Sequence[int] = SCORING_ROWS) -> list[StaticFunction]:
    """Returns those of a program: some that score, and one that only fills the cache."""
    scoring = [StaticFunction(f"rows_{rows}", rows, True) for rows in scoring_rows]
    return [*scoring, StaticFunction(f"prefill_{PREFILL_ROWS}", PREFILL_ROWS, False)]


@dataclass(frozen=True)
class StaticShape:
    """Describes the cache: `slots` hold `context_length` tokens and the padding of any pass."""

    context_length: int
    slots: int

    @classmethod
    def of(cls, context_length: int) -> StaticShape:
        needed = context_length + max(SCORING_ROWS) - 1
        return cls(context_length, -(-needed // 64) * 64)


def chosen_context(config: ModelConfig, asked: int | None) -> int:
    """Returns the tokens that a cache is for. Raises UsageError for more than the model has."""
    longest = config.context_length
    chosen = min(_CONTEXT_TOKENS, longest) if asked is None else asked
    if not 1 <= chosen <= longest:
        raise UsageError(f"a context of {chosen} tokens", remedy=f"Choose 1 to {longest}.")
    return chosen


def require_whole_rows(path: Path, sizes: Iterable[int], remedy: str) -> None:
    """Raises UnsupportedModelError for matrices whose rows, of these sizes, are no whole blocks."""
    for size in sizes:
        if size % BLOCK_SIZE:
            raise UnsupportedModelError(
                f"{path}: rows of {size} weights are not whole blocks of {BLOCK_SIZE}",
                remedy=remedy,
            )


def require_whole_blocks(checkpoint: StoredCheckpoint, remedy: str) -> None:
    """As `require_whole_rows`, of all matrices of a plain model."""
    config = checkpoint.config
    sizes = config.hidden_size, config.query_size, config.intermediate_size
    require_whole_rows(checkpoint.path, sizes, remedy)

"""Common parts of exporters: checks before anything is written, and the bundle's manifest.

`export` raises UsageError for unknown options or an `out` that must not be replaced,
UnsupportedModelError for a model that the format cannot hold, ExportError beyond the quantization's
bound. On errors and interrupts `out` stays as it was.

Static graphs, for NPUs and Core ML, share one layout: a function per number of rows, all with the
same weights. Inputs, outputs and states (rows include padding; slots are the cache's):

    input_ids     [1, rows] int32
    position_ids  [rows] int32              committed tokens + depth in the tree; 0 for padding
    write_slot    [1] int32                 keys and values of row i go to slot write_slot + i
    mask          [1, 1, rows, slots]       0 where a row sees a slot, -30000 elsewhere
    logits        [rows, vocab]             or logits_0, logits_1, ... to concatenate
    hidden        [rows, hidden_size]       after the final norm: on request, and of prefill
                                            functions
    states        [..., kv_heads, slots, head_dim]

A pass first writes the keys and values of all rows, then each row attends to the slots that its
mask admits. So a token's slot is independent of its position, and an accepted path of a tree can
stay in place.
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
    """A way to store weights. Bounds are several times what the demo model measures
    (benchmarks/results/quantizations.json): they stop broken exports, not lossy formats."""

    bits: int
    max_kl_divergence: float  # nats


def chosen_quantization(options: ExportOptions, known: Iterable[str], device: str = "") -> str:
    """Return the requested quantization, by default the first of `known`. Raises UsageError."""
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
    """Check a request before anything is written, and return the quantization. own_options: this
    exporter's own. Raises UnsupportedModelError, UsageError."""
    options.require_only(exporter.format, *own_options)
    name = chosen_quantization(options, known, device)
    require_replaceable(out)
    exporter.require_exportable(checkpoint)
    return name


def require_replaceable(out: Path) -> None:
    """Raises UsageError if a bundle could not replace `out` or be opened there."""
    require_readable(out)
    if out.exists() and not may_replace(out, Manifest):
        raise UsageError(
            f"{out} exists and is not a bundle", remedy="Choose an empty or new directory."
        )


def require_plain(checkpoint: StoredCheckpoint, writer: str) -> None:
    """Raises UnsupportedModelError for features beyond Llama's."""
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
    """Write tokenizer and manifest, then add what `check` measures of the bundle."""
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
    """Report a written bundle. notes: further ones."""
    bundle = open_bundle(out)
    manifest = bundle.manifest
    return ExportReport(out, bundle.num_bytes, manifest.parity, (*manifest.notes, *notes))


BLOCK_SIZE = 32  # weights that share a scale
_CONTEXT_TOKENS = 2048  # default
SCORING_ROWS = (1, 4, 8)
PREFILL_ROWS = 64
MASKED = -30000.0  # of slots that a row does not see


class StaticFunction(NamedTuple):
    """A function of `rows` rows; `scores`: whether it returns logits."""

    name: str
    rows: int
    scores: bool


def functions(scoring_rows: Sequence[int] = SCORING_ROWS) -> list[StaticFunction]:
    """Return scoring functions, and one that only prefills."""
    scoring = [StaticFunction(f"rows_{rows}", rows, True) for rows in scoring_rows]
    return [*scoring, StaticFunction(f"prefill_{PREFILL_ROWS}", PREFILL_ROWS, False)]


@dataclass(frozen=True)
class StaticShape:
    """A cache: `slots` hold `context_length` tokens and the padding of any pass."""

    context_length: int
    slots: int

    @classmethod
    def of(cls, context_length: int) -> StaticShape:
        needed = context_length + max(SCORING_ROWS) - 1
        return cls(context_length, -(-needed // 64) * 64)


def chosen_shape(
    config: ModelConfig, asked: int | None, max_slots: int | None = None, device: str = ""
) -> StaticShape:
    """Return the cache for a context of `asked` tokens. Raises UsageError for a context longer than
    the model's, or a cache of more slots than a state of this model can have (`max_slots`)."""
    longest = config.context_length
    chosen = min(_CONTEXT_TOKENS, longest) if asked is None else asked
    if not 1 <= chosen <= longest:
        raise UsageError(f"a context of {chosen} tokens", remedy=f"Choose 1 to {longest}.")
    shape = StaticShape.of(chosen)
    if max_slots is not None and shape.slots > max_slots:
        raise UsageError(
            f"a context of {chosen} tokens makes a cache of {shape.slots} slots; a state"
            f"{f' for the {device}' if device else ''} holds {max_slots} of this model",
            remedy="Choose a smaller --context.",
        )
    return shape


def require_whole_rows(path: Path, sizes: Iterable[int], remedy: str) -> None:
    """Raises UnsupportedModelError unless rows of these sizes divide into blocks."""
    for size in sizes:
        if size % BLOCK_SIZE:
            raise UnsupportedModelError(
                f"{path}: rows of {size} weights are not whole blocks of {BLOCK_SIZE}",
                remedy=remedy,
            )


def require_whole_blocks(checkpoint: StoredCheckpoint, remedy: str) -> None:
    """Apply `require_whole_rows` to all matrices of a plain model."""
    config = checkpoint.config
    sizes = config.hidden_size, config.query_size, config.intermediate_size
    require_whole_rows(checkpoint.path, sizes, remedy)

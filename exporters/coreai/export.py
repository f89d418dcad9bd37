"""Checkpoint to a bundle with a Core AI program.

The library writes and tries a program in processes of their own, which some mistakes end: nothing
here imports it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.coreai import work
from edge_spec.exporters.parity import (
    Compare,
    Parity,
    compare,
    parity_tokens,
    require_near,
    source_scores,
)
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    StaticShape,
    check_request,
    chosen_context,
    describe,
    report_bundle,
    require_plain,
    require_whole_blocks,
)
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.models.core_ai import FORMAT, PROGRAM, require_writing, running_problem
from edge_spec.storage.atomic import atomic_directory, scratch_beside

# Bits of the layers' matrices, and the farthest from the source, in nats: several times what the
# demo model measures (docs/apple.md).
QUANTIZATIONS: Mapping[str, tuple[int | None, float]] = {
    "int8": (8, 0.05),
    "int4": (4, 1.5),
    "fp32": (None, 1e-4),
}
_MAX_STATE_BYTES = (1 << 31) - 1
_FLOAT = 4  # bytes
_CHECKED_TOKENS = 128  # Core AI computes on one core of Linux
_TRIED_TOKENS = 4  # where nothing is compared
_TIMEOUT_S = 2 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CoreAiExporter:
    format = FORMAT

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "Core AI")

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Writes the bundle `out` and compares it with the reference where Core AI runs."""
        out = out.absolute()
        name = self._checked(checkpoint, out, options)
        bits, bound = QUANTIZATIONS[name]
        kept = first_layers(checkpoint, options.num_layers)
        shape = _shape(kept, options.context_length)
        problem = running_problem()
        compares = options.check and problem is None
        with atomic_directory(out) as directory:
            asked = [bits, options.num_layers, shape.context_length, options.hidden_states]
            _apart(
                lambda done: progress("Writing the program", done),
                work.write,
                str(checkpoint.path),
                str(directory / PROGRAM),
                dumps(asked),
            )
            describe(
                directory,
                kept,
                replace(kept.config, context_length=shape.context_length),
                format=self.format,
                quantization=name if bits is None else f"{name} block {BLOCK_SIZE}",
                check=_against_reference(kept, bound, progress) if compares else None,
            )
            if problem is None and not compares:
                _scores(open_bundle(directory), list(range(_TRIED_TOKENS)), lambda done: None)
        notes = (f"not compared with the reference: {problem}",) if problem is not None else ()
        return report_bundle(out, notes if options.check else ())

    def _checked(self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions) -> str:
        """The quantization."""
        own = ("context_length", "hidden_states")
        name = check_request(self, checkpoint, out, options, QUANTIZATIONS, *own)
        if QUANTIZATIONS[name][0] is not None:
            require_whole_blocks(checkpoint, "Export it with --quant fp32.")
        require_writing()
        return name


def _shape(checkpoint: StoredCheckpoint, asked: int | None) -> StaticShape:
    """Raises UsageError for a context that the model or a state does not hold."""
    config = checkpoint.config
    shape = StaticShape.of(chosen_context(config, asked))
    largest = _MAX_STATE_BYTES // (2 * _FLOAT * config.num_layers * config.kv_size)
    if shape.slots > largest:
        raise UsageError(
            f"a context of {shape.context_length} tokens makes a cache of {shape.slots} slots, and "
            f"a state holds {largest} of this model",
            remedy="Choose a smaller --context.",
        )
    return shape


def _against_reference(
    checkpoint: StoredCheckpoint, max_kl_divergence: float, progress: Progress
) -> Compare:
    """See `parity.against_reference`: of the beginning of the text."""

    def part(start: float) -> Callable[[float], None]:
        return lambda done: progress("Comparing with the reference", start + done / 2)

    def compared(bundle: Bundle) -> Parity:
        tokens = parity_tokens(checkpoint.path, checkpoint.tokenizer_json())
        tokens = tokens[: min(_CHECKED_TOKENS, bundle.config.context_length)]
        source = source_scores(checkpoint, tokens, part(0.0))
        parity = compare(source, _scores(bundle, tokens, part(0.5)), tokens)
        remedy = "Use more bits (--quant int8 or fp32)."
        return require_near(checkpoint.path, parity, max_kl_divergence, remedy)

    return compared


def _scores(bundle: Bundle, tokens: list[int], on_step: Callable[[float], None]) -> np.ndarray:
    """What `score_text` does, in a process of its own."""
    with scratch_beside(bundle.path / "scores.npy", is_file=True) as kept:
        _apart(on_step, work.score, str(bundle.path), dumps(tokens), str(kept))
        found: np.ndarray = np.load(kept)
        return found


def _apart(on_step: Callable[[float], None], call: Callable[..., Any], *arguments: str) -> None:
    """Raises ExportError, and OSError where the disk is full."""
    try:
        isolated(call, *arguments, timeout_s=_TIMEOUT_S, on_step=on_step)
    except IsolatedError as error:
        for number in _FULL:
            if os.strerror(number) in f"{error} {error.printed}":
                raise OSError(number, os.strerror(number)) from None
        raise ExportError(
            f"Core AI does not take the program: {error}",
            remedy="Export the model with --format coreml, onnx or gguf.",
        ) from None

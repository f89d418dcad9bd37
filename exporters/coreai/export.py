"""Write a checkpoint as a bundle with a Core AI program.

The library writes and runs programs in separate processes, which some mistakes crash: nothing here
imports it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.export import ExportOptions, ExportReport
from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.errors import ExportError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.coreai import work
from edge_spec.exporters.parity import OnChunk, against_reference
from edge_spec.exporters.requests import (
    BLOCK_SIZE,
    check_request,
    chosen_shape,
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
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CoreAiExporter:
    format = FORMAT

    def require_exportable(self, checkpoint: StoredCheckpoint) -> None:
        require_plain(checkpoint, "Core AI")

    def export(
        self, checkpoint: StoredCheckpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport:
        """Write the bundle `out`; compare it with the reference where Core AI runs."""
        out = out.absolute()
        own_options = ("context_length", "hidden_states")
        name = check_request(self, checkpoint, out, options, QUANTIZATIONS, *own_options)
        bits, bound = QUANTIZATIONS[name]
        if bits is not None:
            require_whole_blocks(checkpoint, "Export it with --quant fp32.")
        require_writing()
        checkpoint = first_layers(checkpoint, options.num_layers)
        config = checkpoint.config
        max_slots = _MAX_STATE_BYTES // (2 * _FLOAT * config.num_layers * config.kv_size)
        shape = chosen_shape(config, options.context_length, max_slots)
        problem = running_problem()
        is_compared = options.check and problem is None
        remedy = "Use more bits (--quant int8 or fp32)."
        compared = against_reference(
            checkpoint, _score, bound, progress, remedy, num_tokens=_CHECKED_TOKENS
        )
        with atomic_directory(out) as directory:
            asked = [bits, options.num_layers, shape.context_length, options.hidden_states]
            _run_isolated(
                lambda done: progress("Writing the program", done),
                work.write,
                str(checkpoint.path),
                str(directory / PROGRAM),
                dumps(asked),
            )
            describe(
                directory,
                checkpoint,
                replace(config, context_length=shape.context_length),
                format=self.format,
                quantization=name if bits is None else f"{name} block {BLOCK_SIZE}",
                check=compared if is_compared else None,
            )
            if problem is None and not is_compared:
                _score(open_bundle(directory), range(_TRIED_TOKENS), lambda done: None)
        notes = (f"not compared with the reference: {problem}",) if problem is not None else ()
        return report_bundle(out, notes if options.check else ())


def _score(bundle: Bundle, tokens: Sequence[int], on_chunk: OnChunk) -> np.ndarray:
    """Run `score_text` in a separate process."""
    with scratch_beside(bundle.path / "scores.npy", is_file=True) as kept:
        _run_isolated(on_chunk, work.score, str(bundle.path), dumps(list(tokens)), str(kept))
        scores: np.ndarray = np.load(kept)
        return scores


def _run_isolated(
    on_step: Callable[[float], None], call: Callable[..., Any], *arguments: str
) -> None:
    """Raises ExportError, or OSError if the disk is full."""
    try:
        isolated(call, *arguments, timeout_s=_TIMEOUT_S, on_step=on_step)
    except IsolatedError as error:
        for number in _DISK_FULL:
            if os.strerror(number) in f"{error} {error.printed}":
                raise OSError(number, os.strerror(number)) from None
        raise ExportError(
            f"Core AI does not take the program: {error}",
            remedy="Export the model with --format coreml, onnx or gguf.",
        ) from None

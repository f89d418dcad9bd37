"""A trained head beside its target: it shares the target's embedding and output matrix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from edge_spec.core.heads import DFlashHead, EagleHead, MedusaHead
from edge_spec.core.model_info import Checkpoint, SharesTables, TensorRows
from edge_spec.drafters.heads.dflash_network import DFlashNetwork
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.loader.head_backend import head_backend
from edge_spec.models import runtimes
from edge_spec.models.resolve import ResolvedModel
from edge_spec.models.source import Source

_REPORT, _LARGEST_REPORT = "report.json", 1_000_000  # bytes
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class StoredTables:
    """Reads them from the target's own file, row by row."""

    def __init__(self, tensors: TensorRows) -> None:
        self._tensors = tensors

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self._tensors.float32_rows(_EMBEDDING, np.asarray(tokens, np.int64))

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        name = _EMBEDDING if self._tensors.config.tied_embeddings else _OUTPUT
        if tokens is None:
            return self._tensors.float32(name)
        return self._tensors.float32_rows(name, tokens)


def open_trained_head(
    path: Path, source: Source, target: ResolvedModel, threads: int | None = None
) -> EagleNetwork | MedusaNetwork | DFlashNetwork:
    """threads: of the target. Raises as `runtimes.open_head` does, and UsageError for a target
    without the weights that a head shares."""
    head = runtimes.open_head(path, target.config)
    backend = head_backend(path, source.identity, target.config.hidden_size, threads)
    network: EagleNetwork | MedusaNetwork | DFlashNetwork
    if isinstance(head, MedusaHead):
        network = MedusaNetwork(head, backend)
    else:
        tables = (
            _NoTables()
            if _has_tables(head)
            else StoredTables(open_tables(source, f"the head {path} shares"))
        )
        if isinstance(head, DFlashHead):
            network = DFlashNetwork(head, tables, backend)
        else:
            network = EagleNetwork(head, tables, backend)
    network.reported_acceptance = reported_acceptance(path)
    return network


class _NoTables:
    """Stands in for the target's tables beside a head that has both tables of its own."""

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        raise NotImplementedError


def _has_tables(head: EagleHead | DFlashHead) -> bool:
    """Says whether the head needs none of the target's tables."""
    return isinstance(head, EagleHead) and head.embed_rows is not None and "head" in head.tensors


def reported_acceptance(path: Path) -> tuple[float, ...]:
    """Returns the acceptance that `edge-spec distill` has measured and written beside a head, a
    share for each position; nothing if there is no report that can be read: it is only a first
    expectation."""
    try:
        with (path / _REPORT).open("rb") as file:
            found = json.loads(file.read(_LARGEST_REPORT))["acceptance"]
        chances = tuple(float(each) for each in found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ()
    return chances if all(0 <= each <= 1 for each in chances) else ()


def open_tables(source: Source, who: str) -> TensorRows:
    """The embedding and the output matrix, also of a GGUF file that only a library can run; else
    all weights. Raises as `open_weights` does."""
    try:
        return open_weights(source, who)
    except UsageError:
        if not source.path.is_file():
            raise
        found: object = runtimes.open_model_info(source.path)
        if not isinstance(found, SharesTables):
            raise
        return found.shared_tables()


def open_weights(source: Source, who: str) -> Checkpoint:
    """who: shares the target's tables. Raises UsageError for a target without them."""
    try:
        return runtimes.open_checkpoint(source.path)
    except EdgeSpecError as error:
        raise UsageError(
            f"{who} tables of its target, which are not in {source.model}: {error.message}",
            remedy="Name the GGUF file or directory that the target was converted from.",
        ) from None

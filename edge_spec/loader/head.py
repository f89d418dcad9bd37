"""A trained head with its target, whose embedding and output matrix it may share."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from edge_spec.core.heads import (
    WEIGHTS_FILE,
    AssistantHead,
    ComputesHeads,
    DFlashHead,
    EagleHead,
    HeadBackend,
    HeadMatrix,
    MedusaHead,
    StoredStep,
    TargetTables,
    TrainedHead,
)
from edge_spec.core.model_info import Checkpoint, SharesTables, TensorRows
from edge_spec.drafters.heads.assistant import AssistantNetwork
from edge_spec.drafters.heads.independent import MedusaNetwork
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.draft_choice import training_report
from edge_spec.models.kept import KeptDirectory
from edge_spec.models.model_plan import PreparedModel
from edge_spec.models.source import Source, file_states, short_digest
from edge_spec.scheduler.machine import available_cores
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.vocabulary import frequent_tokens

if TYPE_CHECKING:
    from edge_spec.drafters.factory import HeadNetwork

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
STORED_VERSION = 6  # raise it when exporters store a step differently
# Width from which matrices have 4 bits and several threads. Below it bytes are not the cost of a
# step, so 8 bits and one thread take hardly longer.
WIDE = 768
_MOST_THREADS = 4  # for one product: more wait for memory and each other
_GRAPH_FILE = "step.onnx"
_RUNTIME = "ort"

_Scoring = TypeVar("_Scoring", EagleHead | DFlashHead, AssistantHead)
_log = logging.getLogger(__name__)


class StoredTables:
    """Reads tables from the target's file, row by row."""

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
    path: Path,
    source: Source,
    target: PreparedModel,
    threads: int | None = None,
    *,
    keeps: bool = True,
) -> HeadNetwork:
    """Open a head's network. threads: of the target. keeps: cache what is built. Raises as
    `runtimes.open_head` and `head_backend` do, and UsageError for a target without tables that the
    head shares."""
    head = runtimes.open_head(path, target.config)
    who = f"the head {path} shares"
    network: HeadNetwork
    if isinstance(head, AssistantHead):
        tables: TargetTables = StoredTables(open_tables(source, who))
        network = AssistantNetwork(_with_fewer_tokens(head, target), tables)
    else:
        backend = head_backend(path, source.identity, target.config.hidden_size, threads, keeps)
        if isinstance(head, MedusaHead):
            network = MedusaNetwork(head, backend)
        else:
            has_tables = head.embed_rows is not None and head.head_rows is not None
            tables = _NoTables() if has_tables else StoredTables(open_tables(source, who))
            network = LayersNetwork(_with_fewer_tokens(head, target), tables, backend)
    network.reported_acceptance = reported_acceptance(path)
    return network


class _NoTables:
    """For a head that has both tables of its own."""

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        raise NotImplementedError


def _with_fewer_tokens(head: _Scoring, target: PreparedModel) -> _Scoring:
    """Restrict a head to likely tokens of a large vocabulary: drafting others gains less than it
    costs."""
    if head.token_ids is not None or (isinstance(head, AssistantHead) and head.centroids):
        return head
    likely = frequent_tokens(target.vocabulary(), target.config.vocab_size)
    return head if likely is None else head.scoring(likely)


def reported_acceptance(path: Path) -> tuple[float, ...]:
    """Return the acceptance by position that `edge-spec distill` measured, or ()."""
    try:
        chances = tuple(float(each) for each in training_report(path)["acceptance"])
    except (ValueError, TypeError, KeyError):
        return ()
    return chances if all(0 <= each <= 1 for each in chances) else ()


def open_tables(source: Source, who: str) -> TensorRows:
    """Open embedding and output matrix, even of a GGUF file that only a library can run. Raises as
    `open_weights` does."""
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
    """Open the checkpoint with the tables. Raises UsageError without one. who: for the message."""
    try:
        return runtimes.open_checkpoint(source.path)
    except EdgeSpecError as error:
        raise UsageError(
            f"{who} tables of its target, which are not in {source.model}: {error.message}",
            remedy="Name the GGUF file or directory that the target was converted from.",
        ) from None


def head_backend(
    head: Path, target: str, hidden_size: int, threads: int | None = None, keeps: bool = True
) -> HeadBackend:
    """Return what computes a head. target: identity of the model whose tables it shares. threads:
    of a wide head, whose products are worth dividing; None: automatic. keeps: cache what is built.
    Raises MissingDependencyError without onnxruntime."""
    runtime: object = runtimes.load_runtime(_RUNTIME)
    assert isinstance(runtime, ComputesHeads)
    is_wide = hidden_size >= WIDE
    cached = cache_directory() / "heads" / f"{head.name}-{_identity(head, target)}"
    threads = threads or min(available_cores(), _MOST_THREADS)
    bits, threads = (4, threads) if is_wide else (8, 1)
    return StoredBackend(runtime, bits, threads, cached if keeps else None)


@dataclass(frozen=True)
class StoredBackend:
    """Runs exported steps in a runtime. bits: of matrices, or FLOAT_BITS; output matrices have at
    least 8. cached: directory for the step; None: do not keep it."""

    runtime: ComputesHeads
    bits: int
    threads: int | None = None
    cached: Path | None = None

    def __call__(self, head: TrainedHead, matrices: Mapping[str, HeadMatrix]) -> Any:
        return self.runtime.open_head(self._stored(head, matrices), head, self.threads)

    def _stored(self, head: TrainedHead, matrices: Mapping[str, HeadMatrix]) -> StoredStep:
        """An unwritable cache costs only time and memory."""

        def write(weights: BinaryIO) -> bytes:
            return runtimes.step_graph(head, matrices, self.bits, weights)

        def fill(work: Path) -> None:
            with (work / WEIGHTS_FILE).open("wb") as file:
                graph = write(file)
            (work / _GRAPH_FILE).write_bytes(graph)

        if self.cached is not None:
            try:
                kept = KeptDirectory(self.cached).get(fill)
                return StoredStep((kept / _GRAPH_FILE).read_bytes(), kept / WEIGHTS_FILE)
            except OSError as error:
                _log.warning("a head's matrices are not kept: %s", error)
        weights = io.BytesIO()
        return StoredStep(write(weights), weights.getvalue())


def _identity(head: Path, target: str) -> str:
    return short_digest(repr((file_states(head.resolve()), target, STORED_VERSION)))

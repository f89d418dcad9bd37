"""What computes a trained head's steps: onnxruntime with matrices of 8 or 4 bits, whatever runs the
target, and numpy in float32 where onnxruntime is not installed."""

from __future__ import annotations

import logging
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from edge_spec.core.heads import (
    BindsCaches,
    ComputesHeads,
    EagleHead,
    HeadBackend,
    HeadMatrix,
    MedusaHead,
    MedusaStep,
    Products,
)
from edge_spec.drafters.heads.float_products import NumpyBackend
from edge_spec.models import runtimes
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.locks import single_flight

STORED_VERSION = 3  # raise it where exporters store a matrix in another way
# Width from which layers have 4 bits. Below it a head's step takes hardly longer with 8, since what
# it costs is not its bytes; output matrices have 8 bits at every width, as in our bundles.
WIDE = 2048
_DAMAGED = (OSError, EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile)
_LARGEST_GRAPH = 2_000_000_000  # bytes of a message that protobuf serializes
_RUNTIME, _LIBRARY = "ort", "onnxruntime"

_log = logging.getLogger(__name__)


def head_backend(
    head: Path, target: str, hidden_size: int, threads: int | None = None, keeps: bool = True
) -> HeadBackend:
    """target: changes with the model whose tables a head may share. threads: of a wide head, whose
    products are long enough to be divided. keeps: what is made, in the cache."""
    runtime: object = runtimes.load_runtime(_RUNTIME) if find_spec(_LIBRARY) else None
    if not isinstance(runtime, ComputesHeads):
        return NumpyBackend()
    is_wide = hidden_size >= WIDE
    cached = cache_directory() / "heads" / f"{head.name}-{_identity(head, target)}"
    bits, threads = (4, threads) if is_wide else (8, None)
    return StoredBackend(runtime, bits, threads, cached if keeps else None)


@dataclass(frozen=True)
class StoredBackend:
    """Has a runtime compute with what an exporter stores. bits: of matrices, but for output
    matrices, which have 8, or FLOAT_BITS for all. cached: what the files of the cache begin with;
    None: nothing is kept."""

    runtime: ComputesHeads
    bits: int
    threads: int | None = None
    cached: Path | None = None

    def products(self, matrices: Mapping[str, HeadMatrix]) -> Products:
        def make() -> dict[str, bytes]:
            return {
                name: runtimes.product_graph(matrix, max(self.bits, 8 * matrix.is_output))
                for name, matrix in matrices.items()
            }

        stored = self._stored("products", list(matrices), make)
        return self.runtime.open_products(stored, self.threads)

    def eagle_step(self, head: EagleHead, matrices: Mapping[str, HeadMatrix]) -> BindsCaches | None:
        """None for layers that are too large for one file of the format."""
        if not _fits(head):
            return None

        def make() -> dict[str, bytes]:
            return {"step": runtimes.step_graph(head, matrices, self.bits)}

        stored = self._stored("step", ["step"], make)["step"]
        return self.runtime.open_eagle_step(stored, head.config, self.threads)

    def medusa_step(
        self, head: MedusaHead, matrices: Mapping[str, HeadMatrix]
    ) -> MedusaStep | None:
        """None for heads with an output matrix each: those that a round does not ask would be
        computed with the others."""
        if len(head.outputs) > 1:
            return None

        def make() -> dict[str, bytes]:
            return {"heads": runtimes.medusa_graph(head, matrices, self.bits)}

        stored = self._stored("heads", ["heads"], make)["heads"]
        return self.runtime.open_medusa_step(stored, self.threads)

    def _stored(
        self, part: str, names: Collection[str], make: Callable[[], dict[str, bytes]]
    ) -> Mapping[str, bytes]:
        if self.cached is None or not names:
            return make()
        return _kept(self.cached.with_name(f"{self.cached.name}-{part}.zip"), names, make)


def _fits(head: EagleHead) -> bool:
    """Whether a serialized graph can have all of its matrices, at 9 bits a weight."""
    config = head.config
    scored = config.vocab_size if head.token_ids is None else len(head.token_ids)
    queries = 2 * config.query_size  # with gates beside them, where there are any
    attention = 2 * config.hidden_size * (queries + 2 * config.kv_size)
    layer = attention + config.query_size * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.hidden_size * scored
    return weights * 9 / 8 < _LARGEST_GRAPH


def _kept(
    cached: Path, names: Collection[str], make: Callable[[], dict[str, bytes]]
) -> Mapping[str, bytes]:
    """What the cache has, else what is made, which is kept there from now on. A cache that cannot
    be written costs only time."""
    found = _read(cached, names)
    if found is not None:
        return found
    made: dict[str, bytes] | None = None
    try:
        with single_flight(cached, lambda: None):
            found = _read(cached, names)
            if found is not None:
                return found
            made = make()
            with atomic_file(cached) as work, zipfile.ZipFile(work, "w") as file:
                for name, graph in made.items():
                    file.writestr(name, graph)
    except OSError as error:
        _log.warning("a head's matrices are not kept: %s", error)
    return made or make()


def _read(cached: Path, names: Collection[str]) -> dict[str, bytes] | None:
    """None where there is no such file, or where it is damaged."""
    try:
        with cached.open("rb") as opened, zipfile.ZipFile(opened) as file:
            if set(file.namelist()) == set(names):
                return {name: file.read(name) for name in names}  # checks their sums
    except FileNotFoundError:
        return None
    except _DAMAGED as error:
        _log.info("%s is damaged: %s", cached, error)
    return None


def _identity(head: Path, target: str) -> str:
    """Changes with the head's files, with its target's and with how matrices are stored."""
    listed = sorted(head.iterdir()) if head.is_dir() else [head]
    files = [(each.name, each.stat()) for each in listed if each.is_file()]
    told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    key = repr((str(head.resolve()), told, target, STORED_VERSION))
    return sha256(key.encode()).hexdigest()[:16]

"""How a trained head's matrices are multiplied with: in 8 or 4 bits by onnxruntime, whatever runs
the target, and in float32 by numpy where onnxruntime is not installed."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from edge_spec.core.heads import HeadMatrix, MultipliesForHeads, OpensProducts, Products
from edge_spec.drafters.heads.float_products import FloatProducts
from edge_spec.models import runtimes
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.locks import single_flight

STORED_VERSION = 1  # raise it where exporters store a matrix in another way
# Width from which layers have 4 bits. Below it a head's step takes hardly longer with 8, since what
# it costs is not its bytes; output matrices have 8 bits at every width, as in our bundles.
WIDE = 2048
_RUNTIME, _LIBRARY = "ort", "onnxruntime"

_log = logging.getLogger(__name__)


def opens_products(
    head: Path, target: str, hidden_size: int, threads: int | None = None
) -> OpensProducts:
    """target: changes with the model whose tables a head may share. threads: of a wide head, whose
    products are long enough to be divided."""
    runtime: object = runtimes.load_runtime(_RUNTIME) if find_spec(_LIBRARY) else None
    if not isinstance(runtime, MultipliesForHeads):
        return FloatProducts
    is_wide = hidden_size >= WIDE
    cached = cache_directory() / "heads" / f"{head.name}-{_identity(head, target)}.npz"

    def open_them(matrices: Mapping[str, HeadMatrix]) -> Products:
        stored = _kept(cached, matrices, lambda: _made(matrices, 4 if is_wide else 8))
        return runtime.open_products(stored, threads if is_wide else None)

    return open_them


def _made(matrices: Mapping[str, HeadMatrix], bits: int) -> dict[str, bytes]:
    return {
        name: runtimes.product_graph(matrix, 8 if matrix.is_output else bits)
        for name, matrix in matrices.items()
    }


def _kept(
    cached: Path, matrices: Mapping[str, HeadMatrix], make: Callable[[], dict[str, bytes]]
) -> Mapping[str, bytes]:
    """What the cache has, else what is made, which is kept there from now on. A cache that cannot
    be written costs only time."""
    found = _read(cached, matrices)
    if found is not None:
        return found
    made: dict[str, bytes] | None = None
    try:
        with single_flight(cached, lambda: None):
            found = _read(cached, matrices)
            if found is not None:
                return found
            made = make()
            with atomic_file(cached) as work, work.open("wb") as file:
                arrays = {name: np.frombuffer(graph, np.uint8) for name, graph in made.items()}
                np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        _log.warning("a head's matrices are not kept: %s", error)
    return made or make()


def _read(cached: Path, matrices: Mapping[str, HeadMatrix]) -> dict[str, bytes] | None:
    """None where there is no such file, or where it is damaged."""
    try:
        with cached.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if set(stored.files) == set(matrices):
                return {name: stored[name].tobytes() for name in stored.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        _log.info("%s is damaged: %s", cached, error)
    return None


def _identity(head: Path, target: str) -> str:
    """Changes with the head's files, with its target's and with how matrices are stored."""
    files = [(each.name, each.stat()) for each in sorted(head.iterdir()) if each.is_file()]
    told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    key = repr((str(head.resolve()), told, target, STORED_VERSION))
    return sha256(key.encode()).hexdigest()[:16]

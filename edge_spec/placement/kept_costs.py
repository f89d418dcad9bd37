"""Costs of passes of a model that has no profile yet, measured in a moment, once for models of one
shape.

Like what is found of rows, it follows from a library's build, the processor, the form of the
weights and the shapes. Policies correct it by every pass, and a profile takes its place. Where
passes turn out much faster, the machine was busy when it was measured: it is removed then, and the
next process measures it again. Much slower passes say less: the context may be long, or the machine
busy now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edge_spec.control.cost import RowCosts, costs_of
from edge_spec.core.model import Model
from edge_spec.placement.measure import median_seconds, quick_passes, uncertainty
from edge_spec.placement.row_findings import RowsKey
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import (
    LOCK_S,
    DamagedError,
    KeptFile,
    read_sealed,
    require_sealed,
)
from edge_spec.storage.locks import locked

_MOST_SPREAD = 0.5  # of the least certain median, beyond which the machine was too busy to keep it

_log = logging.getLogger(__name__)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _File:
    version: Literal[1]  # raise it when a cost means something else
    key: RowsKey
    seconds: Annotated[dict[Annotated[int, Field(ge=1)], _Seconds], Field(min_length=1)]  # t(k)


_FILE = TypeAdapter(_File)


def row_costs(
    model: Model, key: RowsKey, clock: Callable[[], float] = time.perf_counter
) -> RowCosts:
    """Returns what the cache knows of such a model; else measures it now, and keeps it."""
    path = costs_path(key)
    file = KeptFile(path, _FILE).read()
    if file is not None and file.key == key:
        return costs_of(model.config, file.seconds, partial(_discard, path, file.seconds))
    passes = quick_passes(model, clock=clock)
    seconds = median_seconds(passes)
    if max(map(uncertainty, passes.values())) <= _MOST_SPREAD:
        KeptFile(path, _FILE).keep(lambda old: _File(1, key, seconds))
    return costs_of(model.config, seconds, partial(_discard, path, seconds))


def _discard(path: Path, seconds: Mapping[int, float]) -> None:
    """Removes what was measured on a busy machine, where no other process has replaced it. What it
    costs not to is time, so nothing is raised."""
    try:
        with locked(path, LOCK_S):
            if read_sealed(path, _FILE).seconds == seconds:
                path.unlink()
                _log.info("%s was measured on a busy machine: it is measured again", path)
    except (OSError, DamagedError) as error:
        _log.info("%s stays: %s", path, error)


def kept_costs() -> Iterator[tuple[RowsKey, Mapping[int, float]]]:
    """Yields all that the cache knows, by what it holds for; a damaged file is passed over."""
    for path in sorted((cache_directory() / "costs").glob("*.json")):
        with suppress(OSError, DamagedError):
            file = read_sealed(path, _FILE)
            yield file.key, file.seconds


def costs_path(key: RowsKey) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / "costs" / f"{key.runtime}-{digest}.json"


def read_costs(path: Path) -> RowsKey:
    """Returns what the costs in a file hold for. Raises ModelFileError, OSError."""
    return require_sealed(path, _FILE, "costs").key

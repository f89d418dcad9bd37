"""A plan: where the models of a pair run and who drafts, ranked by what was measured here.

Kept as JSON, in the cache and where `edge-spec plan --out` says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edge_spec.errors import UsageError
from edge_spec.fitting.forecast import FreeMemory, Needs
from edge_spec.models import runtimes
from edge_spec.models.source import Source
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import DamagedError, read_sealed, write_sealed

_log = logging.getLogger(__name__)

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Place:
    """A runtime, its device and settings for one model."""

    runtime: str
    device: str
    threads: Annotated[int, Field(ge=1)] | None  # None: the runtime's choice
    weights: str  # as they are stored, such as "int4 block 32"
    library: str  # the version of the runtime's library
    mmap: bool | None = None  # whether weights stay in their file; None: the runtime's choice
    kernels: str = ""  # in the place of the library's own

    @property
    def is_current(self) -> bool:
        """Says whether the runtime's library, and the kernels in it, are those that are here."""
        return (self.library, self.kernels) == (
            runtimes.library_version(self.runtime),
            runtimes.own_kernels(self.runtime),
        )

    def __str__(self) -> str:
        said = [self.runtime, self.device]
        if self.threads is not None:
            said.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        if self.mmap is not None:
            said.append("mmap" if self.mmap else "no-mmap")
        return " ".join(said)


@dataclass(frozen=True)
class Placement:
    """One way to run a model, with its rate.

    drafter: as after --drafter; "none" is no speculation. tokens_per_s: as texts were written here
    if it `is_measured`, else a forecast; None where the model was not opened, since it does not
    fit. step_s: of the fastest plain step at its place. speedup: over the fastest plain steps of
    all places. draft_tokens: of a round, that a draft model's forecast is best with. overlapped:
    whether it is best where the draft goes on while the target verifies, by what the pair was
    measured at. memory_bytes: of all its models with PLANNED_TOKENS of text, None where a runtime
    cannot tell; on_devices: in devices' own memory, by the labels of `DeviceMemories`.
    """

    target: Place
    draft: Place | None
    drafter: str
    tokens_per_s: _Rate | None = None
    speedup: _Rate | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None  # of verified draft tokens
    row_share: _Share | None = None  # what one row more costs of a step
    guess_share: _Share | None = None  # what a draft token of the draft costs
    memory_bytes: int | None = None
    reason: str = ""  # why it is not the first
    lossless: str = ""  # what holds for texts there by default, where that is known
    # KL divergence of the weights there from those they were converted from, nats a token.
    loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    on_devices: Mapping[str, int] = field(default_factory=dict)
    draft_tokens: int | None = None
    overlapped: bool = False
    is_measured: bool = False
    step_s: _Rate | None = None

    def shortage(self, free: FreeMemory) -> str | None:
        """Says where what is free does not do: "500 MB of 400 MB free", with the device if it is
        one's own memory. None where it does, or where that is not known."""
        return free.shortage(Needs(self.memory_bytes or 0, self.on_devices))

    def __str__(self) -> str:
        draft = "" if self.draft is None else f", draft on {self.draft}"
        return f"{self.target}{draft}, drafter {self.drafter}"


@dataclass(frozen=True)
class Plan:
    """Placements, the best first; those that did not fit when it was made come last. notes: a line
    for each place or drafter without a forecast, or with an uncertain one. places: all that were
    looked at, for either model. made_by: the version of edge-spec."""

    version: Literal[1]  # raise it when a plan means something else
    model: str
    identity: str  # of the model's files
    draft: str | None  # as the user named it
    draft_identity: str | None
    placements: Annotated[tuple[Placement, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()
    prefer: Literal["speed"] = "speed"  # one of before that preferred energy is to be made again
    places: tuple[Place, ...] = ()
    made_by: str = ""


_PLAN = TypeAdapter(Plan)


def plan_path(source: Source, draft: Source | None) -> Path:
    """Returns where the cached plan of a model, or of a pair, is."""
    pair = "" if draft is None else f"-{draft.name}-{draft.identity}"
    return cache_directory() / "plans" / f"{source.name}-{source.identity}{pair}.json"


def save_plan(plan: Plan, path: Path) -> None:
    """Raises OSError."""
    write_sealed(path, _PLAN, plan)


def plan_json(plan: Plan) -> str:
    return _PLAN.dump_json(plan).decode()


def read_plan(path: Path, *, sealed: bool = False) -> Plan:
    """Reads a plan. One that was written by `plan --json`, or by hand, has no sha256, and is read,
    too, unless it has to be `sealed`.

    Raises UsageError for what is no plan of this version, OSError.
    """
    try:
        return read_sealed(path, _PLAN, required=sealed)
    except DamagedError as error:
        raise UsageError(
            f"{path} is no plan that this version can read: {error}",
            remedy="Make it again with edge-spec plan --out, or delete its sha256 if you "
            "changed it yourself.",
        ) from None


def cached_plan(path: Path) -> Plan | None:
    """Returns the plan in the cache, None where there is none; a damaged one is passed over, which
    one line says."""
    try:
        return read_plan(path, sealed=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UsageError, OSError) as error:
        _log.warning("the cached plan is not used: %s", error)
        return None

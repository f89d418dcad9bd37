"""A plan: where the models of a pair run and who drafts, ranked by what was measured here; and the
options that models are opened with by it. Kept with the other measurements, and as JSON where
`edge-spec plan --out` says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from edge_spec.core import entry_points
from edge_spec.core.model import Progress
from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions, declared_options
from edge_spec.models.devices import CPU, Device, free_bytes, list_devices
from edge_spec.models.memory import DeviceMemories, FreeMemory, Needs
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.storage.measurements import DamagedError, Quantity, read_sealed, write_sealed

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


@dataclass(frozen=True)
class _Key:
    identity: str  # of the model's files
    draft_identity: str | None
    libraries: tuple[str, ...]  # of all runtimes, their versions; "" of those not installed


_PLANS = Quantity("plan", _Key, _PLAN)


def kept_plan(source: Source, draft: Source | None) -> Plan | None:
    """Return the plan that was made here of a model, or of a pair, with these libraries."""
    return _PLANS.known(_key(source.identity, draft.identity if draft else None))


def keep_plan(plan: Plan) -> None:
    """Keep a plan for later runs."""
    _PLANS.keep(_key(plan.identity, plan.draft_identity), plan)


def _key(identity: str, draft_identity: str | None) -> _Key:
    versions = map(runtimes.library_version, runtimes.LIBRARIES)
    return _Key(identity, draft_identity, tuple(versions))


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan for `--plan`. Raises OSError."""
    write_sealed(path, _PLAN, plan)


def plan_json(plan: Plan) -> str:
    return _PLAN.dump_json(plan).decode()


def read_plan(path: Path) -> Plan:
    """Reads a plan. One that was written by `plan --json`, or by hand, has no sha256, and is read,
    too.

    Raises UsageError for what is no plan of this version, OSError.
    """
    try:
        return read_sealed(path, _PLAN, required=False)
    except DamagedError as error:
        raise UsageError(
            f"{path} is no plan that this version can read: {error}",
            remedy="Make it again with edge-spec plan --out, or delete its sha256 if you "
            "changed it yourself.",
        ) from None


_DECLARED = declared_options(AskedOptions)
# With one of these, what a kept plan was made for is not what was asked for.
_ASKED = tuple(name for name, each in _DECLARED.items() if each.option.is_place)
_CHANGED = (
    *("quantization", "block_size"),
    *(name for name, each in _DECLARED.items() if each.option.runtimes),
)


def planned(source: Source, options: LoadOptions, progress: Progress) -> LoadOptions:
    """Returns the options as a plan completes them: all of the one that they name, else the places
    of the one that is kept of this model or pair, unless they choose a place or other weights
    themselves.

    Its best placement is taken, or the next that fits memory and whose devices are there, which
    one line says. Raises UsageError for a plan that was named and cannot be used.
    """
    if options.plan is None:
        return _where_it_was_fastest(source, options, progress)
    file = Path(options.plan)
    if not file.is_file():
        raise UsageError(
            f"there is no plan {file}",
            remedy=f"Make one: edge-spec plan {source.model} --out {file}.",
        )
    plan = read_plan(file)
    if plan.identity != source.identity:
        raise UsageError(
            f"{file} is a plan for {plan.model}, not for {source.model} as it is now",
            remedy=f"Make one: edge-spec plan {source.model} --out {file}.",
        )
    placement = _usable(plan.placements)
    if placement is None:
        raise UsageError(
            f"nothing in {file} can run here now: {_Machine().obstacle(plan.placements[0])}",
            remedy="Free memory, or make the plan again with edge-spec plan.",
        )
    _require_agreement(placement, plan, options)
    return applied(options, placement, plan.draft)


def applied(options: LoadOptions, placement: Placement, draft: str | None) -> LoadOptions:
    """Returns the options with those of a placement. draft: the model that drafts where it has one.
    A drafter that was asked for stays, and so does "auto" where there are corpora or answers of
    before, which no plan knows."""
    own = options.drafter != "auto" or options.corpora or options.remember
    return placed(
        options,
        placement,
        draft=() if placement.draft is None or draft is None else (draft,),
        drafter=options.drafter if own else placement.drafter,
    )


def placed(options: LoadOptions, placement: Placement, **also: Any) -> LoadOptions:
    """Returns the options with a placement's runtimes, devices and threads. also: others."""
    target, drafting = placement.target, placement.draft
    if drafting is not None and also.get("draft", options.drafts):
        also |= {
            "draft_runtime": drafting.runtime,
            "draft_device": drafting.device,
            "draft_threads": drafting.threads,
        }
    return replace(
        options,
        plan=None,
        runtime=target.runtime,
        device=target.device,
        threads=target.threads,
        mmap=target.mmap,
        **also,
    )


def _best_now(plan: Plan, options: LoadOptions) -> Placement | None:
    """Return the best placement that can run now, with a draft where one was asked for; None where
    there is none, or kernels have changed since.

    Its drafter is not looked at: a few texts say little of others, so who drafts is decided round
    by round, and a draft that was asked for is asked."""
    fitting = [each for each in plan.placements if bool(each.draft) == bool(options.drafts)]
    placement = _usable(tuple(fitting or plan.placements))
    is_current = placement is not None and all(each.is_current for each in _places(placement))
    return placement if is_current else None


def _where_it_was_fastest(source: Source, options: LoadOptions, progress: Progress) -> LoadOptions:
    if not is_open(options):
        return options
    plan = kept_plan(source, Source(options.drafts[0], progress) if options.drafts else None)
    placement = None if plan is None else _best_now(plan, options)
    if placement is None:
        return options
    target = placement.target
    usual = target.runtime == runtimes.auto_runtime(source.formats)  # else with other weights
    if not usual or (target.threads, target.mmap) != (None, None):
        places = " and ".join(map(str, _places(placement)))
        progress(f"Running where plan measured it fastest: {places} ({target.weights})", 0.0)
    return placed(options, placement)


def is_open(options: LoadOptions) -> bool:
    """Says whether nothing was asked for that a plan decides or does not hold for."""
    default = LoadOptions()
    asked = any(_read(options, name) != _read(default, name) for name in _ASKED + _CHANGED)
    asked = asked or options.exact or options.draft_overlap != default.draft_overlap
    return not asked and len(options.drafts) <= 1 and options.head is None


def _usable(placements: tuple[Placement, ...]) -> Placement | None:
    """Returns the first without an obstacle; where it is not the best, one line says why."""
    machine = _Machine()
    for placement in placements:
        if machine.obstacle(placement) is None:
            if placement is not placements[0]:
                _log.warning(
                    "the plan's best is not used, %s; the next is: %s",
                    machine.obstacle(placements[0]),
                    placement,
                )
            return placement
    return None


class _Machine:
    """The devices and the memory that are there now; devices are listed once, where a placement
    uses one."""

    def obstacle(self, placement: Placement) -> str | None:
        """Says what is in the way of a placement; None where nothing is."""
        for place in _places(placement):
            module = dict(runtimes.AUTO_RUNTIMES).get(place.runtime)
            if place.runtime not in entry_points.names("runtimes") or (
                module and not find_spec(module)
            ):
                extra = entry_points.extra_of(place.runtime)
                return f'{place.runtime} is not installed (pip install "edge-spec[{extra}]")'
            if place.device != CPU and not any(
                (device.runtime, device.name, device.fault) == (place.runtime, place.device, None)
                for device in self._devices
            ):
                return f"{place.runtime} has no device {place.device} now"
        on_devices = DeviceMemories(self._devices).free() if placement.on_devices else {}
        shortage = placement.shortage(FreeMemory(free_bytes(), on_devices))
        return None if shortage is None else f"it needs {shortage}"

    @cached_property
    def _devices(self) -> list[Device]:
        return list_devices()


def _places(placement: Placement) -> Iterator[Place]:
    yield placement.target
    if placement.draft is not None:
        yield placement.draft


def _require_agreement(placement: Placement, plan: Plan, options: LoadOptions) -> None:
    """Raises UsageError for an option that says something else than the plan."""
    default = LoadOptions()
    pinned = applied(default, placement, plan.draft)
    for name in ("drafter", "draft", *_ASKED, *_CHANGED):
        given = _read(options, name)
        agreeing = [_read(default, name), _read(pinned, name)]
        if name == "draft":  # the plan may leave out the draft that it was made for
            agreeing.append((plan.draft,))
        if given not in agreeing:
            flag = _DECLARED[name].flag if name in _DECLARED else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} contradicts the plan {options.plan}, which says: {placement}",
                remedy="Leave out one of the two.",
            )


def _read(options: LoadOptions, name: str) -> Any:
    """A value as it is compared, however it was said."""
    read = {"device": options.providers, "draft_device": options.draft_providers}
    read |= {"draft": options.drafts, "rpc": tuple(options.rpc)}
    return read[name] if name in read else getattr(options, name)

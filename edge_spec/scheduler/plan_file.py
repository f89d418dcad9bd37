"""What `edge-spec plan` measured of a model or a pair, as a document and as the file that
`--plan` takes: that pins the places and the drafter of its first entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from edge_spec.errors import UsageError
from edge_spec.models.asked_options import AskedOptions, declared_options
from edge_spec.models.memory import FreeMemory, Needs
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.storage.measurements import DamagedError, read_sealed, write_sealed

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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

    drafter: as after --drafter; "none" is no speculation. step_s: of plain decoding at its place,
    by passes; None where the model was not opened, since it does not fit.
    tokens_per_s: as short texts were written here where there is a `speedup`, over plain decoding
    beside them; else of plain steps, None for a draft that was not tried. memory_bytes: of all its
    models with PLANNED_TOKENS of text, None where a runtime cannot tell; on_devices: in devices'
    own memory, by the labels of `DeviceMemories`.
    """

    target: Place
    draft: Place | None
    drafter: str
    tokens_per_s: _Rate | None = None
    speedup: _Rate | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None  # of verified draft tokens
    memory_bytes: int | None = None
    reason: str = ""  # why it is not the first
    lossless: str = ""  # what holds for texts there by default, where that is known
    # KL divergence of the weights there from those they were converted from, nats a token.
    loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    on_devices: Mapping[str, int] = field(default_factory=dict)
    step_s: _Rate | None = None

    def shortage(self, free: FreeMemory) -> str | None:
        """Say where what is free does not do: "500 MB of 400 MB free", with the device if it is
        one's own memory. None where it does, or where that is not known."""
        return free.shortage(Needs(self.memory_bytes or 0, self.on_devices))

    def __str__(self) -> str:
        draft = "" if self.draft is None else f", draft on {self.draft}"
        return f"{self.target}{draft}, drafter {self.drafter}"


@dataclass(frozen=True)
class Plan:
    """Placements, the best first. notes: a line for each place or drafter that cannot be used, and
    for what is uncertain."""

    version: Literal[1]  # raise it when a plan means something else
    model: str
    identity: str  # of the model's files
    draft: str | None  # as the user named it
    draft_identity: str | None
    placements: Annotated[tuple[Placement, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()
    prefer: Literal["speed"] = "speed"  # older files that say "energy" are refused
    in_force: tuple[str, ...] = ()  # what a start runs by now, who drafts and why


@cache
def _plan() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan for `--plan`. Raises OSError."""
    write_sealed(path, _plan(), plan)


def plan_json(plan: Plan) -> str:
    return _plan().dump_json(plan).decode()


def read_plan(path: Path) -> Plan:
    """Read a plan. One that was written by `plan --json`, or by hand, has no sha256, and is read,
    too.

    Raises UsageError for what is no plan of this version, OSError.
    """
    try:
        return read_sealed(path, _plan(), required=False)
    except DamagedError as error:
        raise UsageError(
            f"{path} is no plan that this version can read: {error}",
            remedy="Make it again with edge-spec plan --out, or delete its sha256 if you "
            "changed it yourself.",
        ) from None


_DECLARED = declared_options(AskedOptions)
# With one of these, what was measured is not what was asked for.
_ASKED = tuple(name for name, each in _DECLARED.items() if each.is_place)
_CHANGED = (
    *("quantization", "block_size"),
    *(name for name, each in _DECLARED.items() if each.runtimes),
)


def pinned_options(source: Source, options: LoadOptions) -> Iterator[LoadOptions]:
    """Yield the options with what each placement of their plan says, the best first. Raises
    UsageError for a plan that is not there or of another model, and for an option that contradicts
    its best placement."""
    file = Path(options.plan or "")
    remedy = f"Make one: edge-spec plan {source.model} --out {file}."
    if not file.is_file():
        raise UsageError(f"there is no plan {file}", remedy=remedy)
    plan = read_plan(file)
    if plan.identity != source.identity:
        what = f"{file} is a plan for {plan.model}, not for {source.model} as it is now"
        raise UsageError(what, remedy=remedy)
    _require_agreement(plan.placements[0], plan, options)
    for placement in plan.placements:
        yield apply_placement(options, placement, plan.draft)


def apply_placement(options: LoadOptions, placement: Placement, draft: str | None) -> LoadOptions:
    """Return the options with those of a placement. draft: the model that drafts where it has one.
    A drafter that was asked for stays, and so does "auto" where there are corpora or answers of
    before, which no plan knows."""
    own = options.drafter != "auto" or options.corpora or options.remember
    also: dict[str, Any] = {
        "draft": () if placement.draft is None or draft is None else (draft,),
        "drafter": options.drafter if own else placement.drafter,
    }
    target, drafting = placement.target, placement.draft
    if drafting is not None and also["draft"]:
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


def is_open(options: LoadOptions) -> bool:
    """Say whether nothing was asked for that measurements decide, or do not hold for."""
    default = LoadOptions()
    asked = any(_read(options, name) != _read(default, name) for name in _ASKED + _CHANGED)
    asked = asked or options.exact or options.draft_overlap != default.draft_overlap
    return not asked and len(options.drafts) <= 1 and options.head is None


def _require_agreement(placement: Placement, plan: Plan, options: LoadOptions) -> None:
    """Raises UsageError for an option that says something else than the plan."""
    default = LoadOptions()
    pinned = apply_placement(default, placement, plan.draft)
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

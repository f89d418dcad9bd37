"""Profiles: the time of one model's passes on one runtime and device, what follows from it for a
step, and what use has taught of the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.model_plan import PreparedModel, joined_types
from edge_spec.models.source import EXPORT_VERSION, Source
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.machine import cpu_name
from edge_spec.storage.measurements import DamagedError, Quantity, read_sealed, write_sealed

TYPICAL_TOKENS = 256  # of context: of the costs that policies know

LEAST_S = 1e-9  # of a pass, where a coarse clock sees no time go by
USUAL_DRAFT_TOKENS = 4

MOST_SPREAD = 0.5  # of the least certain median, beyond which the machine was too busy

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsByRows = Annotated[dict[Annotated[int, Field(ge=1)], Seconds], Field(min_length=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def was_busy(spread: float) -> bool:
    """Return whether the machine was too busy for times that are off by this share."""
    return spread > MOST_SPREAD


@dataclass(frozen=True)
class ProfileKey:
    """All that a profile depends on."""

    model: str
    identity: str  # of the model's files
    weights: str  # as they are stored, such as "int4 block 32"
    runtime: str
    library: str  # the version of the runtime's library
    device: str  # "" where the runtime chooses
    threads: int | None  # None: the runtime's choice
    options: tuple[str, ...]  # others that were set, such as "kv_type=f16"
    cpu: str
    kernels: str = ""  # in the place of the library's own
    export: int = EXPORT_VERSION  # of conversions

    @property
    def file_name(self) -> str:
        """Name the file of a profile that travels with its model. All versions of the runtime's
        library have one name, so that a newer profile replaces an older one."""
        digest = replace(self, library="").digest[:16]
        return f"{self.model}-{self.runtime}-{digest}.json"

    @property
    def digest(self) -> str:
        """Changes with the model and with how it is run."""
        parts = asdict(self)
        if not self.kernels:  # as it was named before there were kernels of ours
            del parts["kernels"]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ContextCosts:
    """t(k) after a context of this many tokens."""

    context_tokens: Annotated[int, Field(ge=0)]
    seconds: SecondsByRows


@dataclass(frozen=True)
class Profile:
    """One measurement. `measure.measure` says how each number comes about."""

    contexts: Annotated[tuple[ContextCosts, ...], Field(min_length=1)]  # the shortest first
    prefill_tokens_per_s: Seconds
    commit_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of a round, outside its pass
    logits_row_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # to copy one row
    rounds: Annotated[int, Field(ge=1)]  # in which every width was measured
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of the least certain median
    num_experts: int = 0
    experts_used: int = 0
    branches: bool = False  # whether draft tokens may branch without changing a number
    resident_bytes: int | None = None  # by which the process grew with the model, where known
    # Our plain step over that of the library's own loop, where it has one.
    own_loop_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def is_certain(self) -> bool:
        """Return whether the machine was free enough for it to be used again."""
        return not was_busy(self.spread)

    def seconds(self, context_tokens: int) -> dict[int, float]:
        """Return t(k) between the measured contexts, and beyond the longest as it grew between
        them."""
        first, last = self.contexts[0], self.contexts[-1]
        span = last.context_tokens - first.context_tokens
        share = max(0.0, (context_tokens - first.context_tokens) / span) if span > 0 else 0.0
        found = {}
        for rows, cost in first.seconds.items():
            more = last.seconds.get(rows, cost) - cost
            found[rows] = cost + share * (more if share <= 1 else max(0.0, more))
        return found

    def costs(self, context_tokens: int) -> RowCosts:
        return RowCosts(self.seconds(context_tokens), self.num_experts, self.experts_used)

    def step_s(self, rows: int = 1) -> float:
        """Return the seconds of a step without its drafting: the pass, reading its logits, and its
        commit."""
        return self.costs(TYPICAL_TOKENS).at(rows) + rows * self.logits_row_s + self.commit_s


@dataclass(frozen=True)
class PairFindings:
    """The times of a target and its draft beside each other, as `measure.probe_pair` finds them.

    switch_s: of a step, more than its passes take where each model runs alone: for the other
    model's data in caches, threads and clocks of devices that have gone to sleep, and copies.
    target_slowdown, draft_slowdown: a pass while the other model runs over one alone.
    draft_token_s: of passes that follow each other, with their scores in main memory; None where
    that was not measured.
    """

    switch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    target_slowdown: Seconds
    draft_slowdown: Seconds
    draft_token_s: Seconds | None = None

    def overlap_saves_s(self, target: RowCosts, draft_s: float) -> float:
        """Return the seconds of a usual step that are saved where the draft goes on while the
        target verifies, if all that it reads meanwhile is of use. Not positive: it never pays."""
        pass_s = target.at(USUAL_DRAFT_TOKENS + 1)
        beside_s = draft_s * self.draft_slowdown  # of a draft token, meanwhile
        # Its last pass is waited for: half of one, as they come. One of them reads the token that
        # the target adds.
        waited_s = pass_s * self.target_slowdown + beside_s / 2
        ready = max(0, int(waited_s / max(beside_s, LEAST_S)) - 1)
        return min(USUAL_DRAFT_TOKENS, ready) * draft_s - (waited_s - pass_s)


_PROFILE = Quantity("profile", ProfileKey, lambda: TypeAdapter(Profile))
# By the digest of the draft's key.
_PAIRS = Quantity("pair", ProfileKey, lambda: TypeAdapter(dict[str, PairFindings]))
_LEARNT = Quantity("learnt", ProfileKey, lambda: TypeAdapter(dict[str, list[_Finite]]))


@dataclass(frozen=True)
class _File:
    """A profile that travels with its model."""

    version: Literal[1]  # raise it when a profile means something else
    key: ProfileKey
    profile: Profile | None = None


@cache
def _file() -> TypeAdapter[_File]:
    return TypeAdapter(_File)


def draft_token_s(costs: RowCosts, draft: Profile | None, findings: PairFindings | None) -> float:
    """Return the seconds of a draft token, with the call of its device and the way of its scores to
    main memory: as the pair was measured, else as the draft was alone. costs: of the draft."""
    if findings is not None and findings.draft_token_s is not None:
        return findings.draft_token_s
    return costs.at(1) + (0.0 if draft is None else draft.logits_row_s + draft.commit_s)


def usual_step_s(
    target: Profile, draft: Profile, findings: PairFindings | None, overlaps: bool
) -> float:
    """Return the seconds of a step with USUAL_DRAFT_TOKENS draft tokens. overlaps: whether the
    draft can go on while the target verifies."""
    draft_s = draft_token_s(draft.costs(TYPICAL_TOKENS), draft, findings)
    taken_s = target.step_s(USUAL_DRAFT_TOKENS + 1) + USUAL_DRAFT_TOKENS * draft_s
    if findings is None:
        return taken_s
    saved_s = findings.overlap_saves_s(target.costs(TYPICAL_TOKENS), draft_s) if overlaps else 0.0
    return taken_s + findings.switch_s - max(0.0, saved_s)


def profile_key(source: Source, prepared: PreparedModel, options: RuntimeOptions) -> ProfileKey:
    """Return what a profile of this model depends on. The context's length is no part of it: t(k)
    is kept for a short and a long context."""
    return ProfileKey(
        model=source.name,
        identity=source.identity,
        weights=stored_weights(prepared),
        runtime=prepared.runtime.name,
        library=runtimes.library_version(prepared.runtime.name),
        device=",".join(options.providers),
        threads=options.threads,
        options=options_apart(options),
        cpu=cpu_name(),
        kernels=runtimes.own_kernels(prepared.runtime.name),
    )


def options_apart(options: RuntimeOptions) -> tuple[str, ...]:
    """Return those that were set and that a key has no field for."""
    apart = (
        *("threads", "providers", "context_length", "prefers_cpu", "may_hold_less"),
        "scored_tokens",  # of the weights
    )
    return tuple(
        f"{option.name}={getattr(options, option.name)}"
        for option in fields(options)
        if option.name not in apart and getattr(options, option.name) != option.default
    )


def kept_profiles(source: Source) -> Iterator[tuple[ProfileKey, Profile]]:
    """Yields the certain ones of this model that are known here."""
    for found in _PROFILE.find():
        if found.value.is_certain and found.key.identity == source.identity:
            yield found.key, found.value


def stored_weights(prepared: PreparedModel) -> str:
    """Return what kernels are chosen by, of a model as it is stored."""
    if isinstance(prepared.source, Bundle):
        return prepared.source.manifest.weights
    scored = prepared.scored_tokens
    types = joined_types(prepared.source.weight_types)
    return types if scored is None else f"{types}, {scored}"


def load_profile(key: ProfileKey, bundled: Path | None = None) -> Profile | None:
    """Return the certain profile that holds for this key; None where there is none.

    bundled: a directory of profiles that came with the model. Looked into where none is known:
    what was measured on this very device says more than what was on one like it.
    """
    found = _PROFILE.known(key)
    if (found is None or not found.is_certain) and bundled is not None:
        with suppress(OSError, DamagedError):
            file = read_sealed(bundled / key.file_name, _file())
            found = file.profile if file.key == key else None
    return found if found is not None and found.is_certain else None


def write_profiles(source: Source, directory: Path) -> None:
    """Write what is known of this model, to travel with it. Raises OSError."""
    for key, profile in kept_profiles(source):
        write_sealed(directory / key.file_name, _file(), _File(1, key, profile))


def save_profile(key: ProfileKey, profile: Profile) -> None:
    """Keep a profile in place of another one, unless it is uncertain and the other one is not.
    Pairs were measured beside the one of before, so they are not known any more."""
    _PAIRS.keep(key, {})
    if profile.is_certain or load_profile(key) is None:
        _PROFILE.keep(key, profile, profile.rounds, profile.spread)


def doubt_profile(key: ProfileKey) -> None:
    """Have a profile measured again: the machine was busy when it was made."""
    found = _PROFILE.known(key)
    if found is not None:
        _PROFILE.keep(key, replace(found, spread=2 * MOST_SPREAD), found.rounds, 2 * MOST_SPREAD)


def load_pair(target: ProfileKey, draft: ProfileKey) -> PairFindings | None:
    """Return how the two run beside each other; None where they were not measured together."""
    return (_PAIRS.known(target) or {}).get(draft.digest)


def save_pair(target: ProfileKey, draft: ProfileKey, found: PairFindings) -> None:
    """Kept until the target's profile is made again."""
    _PAIRS.update(target, lambda old: {**(old or {}), draft.digest: found})


def load_learnt(key: ProfileKey) -> Mapping[str, list[float]]:
    """Return what live use has learnt, by name; empty where there is nothing. It outlives a change
    of the runtime's library."""
    return _LEARNT.known(replace(key, library="")) or {}


def save_learnt(key: ProfileKey, learnt: Mapping[str, list[float]]) -> None:
    """Add to what is there; of one name, the last writer's stays."""
    _LEARNT.update(replace(key, library=""), lambda old: {**(old or {}), **learnt})

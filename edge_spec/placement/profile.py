"""Profiles: the time of one model's passes on one runtime and device, and what use has taught of
it. Both are kept in the cache, one JSON file for each model, runtime, device and set of options."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from edge_spec.control.cost import RowCosts
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import ModelFileError
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.resolve import ResolvedModel, joined_types
from edge_spec.models.source import EXPORT_VERSION, Source
from edge_spec.placement.machine import cpu_name
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.json_store import DamagedError, KeptFile, read_sealed

TYPICAL_TOKENS = 256  # of context: of the costs that policies know

MOST_SPREAD = 0.5  # of the least certain median, beyond which the machine was too busy

_log = logging.getLogger(__name__)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def was_busy(spread: float) -> bool:
    """Says whether times that are off by this share of them are of a machine that was too busy."""
    return spread > MOST_SPREAD


@dataclass(frozen=True)
class ProfileKey:
    """All that a profile depends on. The file's name follows from all of it but the library's
    version, so that a profile of another version is found, and replaced."""

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

    @property
    def path(self) -> Path:
        digest = replace(self, library="").digest[:16]
        return cache_directory() / "profiles" / f"{self.model}-{self.runtime}-{digest}.json"

    @property
    def digest(self) -> str:
        """Changes with the model and with how it is run."""
        parts = {**key_parts(self), "export": EXPORT_VERSION}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ContextCosts:
    """t(k) after a context of this many tokens."""

    context_tokens: Annotated[int, Field(ge=0)]
    seconds: Annotated[dict[Annotated[int, Field(ge=1)], _Seconds], Field(min_length=1)]


@dataclass(frozen=True)
class Profile:
    """One measurement. `measure.measure` says how each number comes about."""

    contexts: Annotated[tuple[ContextCosts, ...], Field(min_length=1)]  # the shortest first
    prefill_tokens_per_s: _Seconds
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
        """Says whether the machine was free enough for it to be used again."""
        return not was_busy(self.spread)

    def seconds(self, context_tokens: int) -> dict[int, float]:
        """Returns t(k) between the measured contexts, and beyond the longest as it grew between
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


@dataclass(frozen=True)
class PairFindings:
    """The times of a target and its draft beside each other, as `pair_probe` measures them.

    switch_s: of a round, more than its passes take where each model runs alone: for the other
    model's data in caches, threads and clocks of devices that have gone to sleep, and copies.
    target_slowdown, draft_slowdown: a pass while the other model runs over one alone.
    call_s, row_s: of the draft's passes that follow each other, with their scores in main memory,
    what each takes and what each of its rows adds; None where that was not measured.
    """

    switch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    target_slowdown: _Seconds
    draft_slowdown: _Seconds
    call_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    row_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @property
    def draft_token_s(self) -> float | None:
        """Returns what a draft token takes, as measured among others; None where it was not."""
        return None if self.call_s is None or self.row_s is None else self.call_s + self.row_s


@dataclass(frozen=True)
class _File:
    version: Literal[1]  # raise it when a profile means something else
    key: ProfileKey
    profile: Profile | None = None
    learnt: dict[str, list[_Finite]] = field(default_factory=dict)
    pairs: dict[str, PairFindings] = field(default_factory=dict)  # by the digest of a draft's key


_FILE = TypeAdapter(_File)


def profile_key(source: Source, prepared: ResolvedModel, options: RuntimeOptions) -> ProfileKey:
    """Returns what a profile of this model depends on. The context's length is no part of it: t(k)
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


def key_parts(key: Any) -> dict[str, Any]:
    """Returns the fields of a key, by which its file is named. Kernels are left out where there are
    none but the library's, so that what was measured of these before is found."""
    parts = asdict(key)
    if not parts["kernels"]:
        del parts["kernels"]
    return parts


def options_apart(options: RuntimeOptions) -> tuple[str, ...]:
    """Returns those that were set and that a key has no field for."""
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
    """Yields the certain ones of this model in the cache; a damaged file is passed over."""
    for path in sorted((cache_directory() / "profiles").glob("*.json")):
        with suppress(OSError, DamagedError):
            file = read_sealed(path, _FILE)
            found = file.profile
            if found is not None and found.is_certain and file.key.identity == source.identity:
                yield file.key, found


def stored_weights(prepared: ResolvedModel) -> str:
    """Returns what kernels are chosen by, of a model as it is stored."""
    if isinstance(prepared.source, Bundle):
        manifest = prepared.source.manifest
        form = " stacked" if manifest.kv_cache == "whole" else ""  # other kernels, and other costs
        return manifest.quantization + form
    scored = prepared.scored_tokens
    types = joined_types(prepared.source.weight_types)
    return types if scored is None else f"{types}, {scored}"


def load_profile(key: ProfileKey, bundled: Path | None = None) -> Profile | None:
    """Returns the certain profile that holds for this key; None where there is none; one line says
    why, where there is one for something else.

    bundled: a directory of profiles that came with the model. Looked into where the cache has none:
    what was measured on this very device says more than what was on one like it.
    """
    file = _kept(key).read()
    if file is None or file.profile is None or not file.profile.is_certain:
        return None if bundled is None else _bundled(key, bundled / key.path.name)
    if file.key != key:
        _log.warning(
            "the profile of %s on %s is of version %s of its library, not %s: it is made again",
            key.model,
            key.runtime,
            file.key.library,
            key.library,
        )
        return None
    return file.profile


def _bundled(key: ProfileKey, path: Path) -> Profile | None:
    """A file that came with a model is never removed: `edge-spec doctor` names a damaged one."""
    try:
        file = read_sealed(path, _FILE)
    except (OSError, DamagedError):
        return None
    holds = file.key == key and file.profile is not None and file.profile.is_certain
    return file.profile if holds else None


def read_key(path: Path) -> ProfileKey:
    """Returns what the profile in a file holds for. Raises ModelFileError, OSError."""
    try:
        return read_sealed(path, _FILE).key
    except DamagedError as error:
        raise ModelFileError(
            f"{path} is no profile of this version: {error}",
            remedy="Delete it, or copy the profile again.",
        ) from None


def save_profile(key: ProfileKey, profile: Profile) -> None:
    """Takes the place of another one; what was learnt stays. Raises OSError."""
    _kept(key).update(lambda old: _File(1, key, profile, old.learnt if old else {}))


def load_pair(target: ProfileKey, draft: ProfileKey) -> PairFindings | None:
    """Returns how the two run beside each other; None where they were not measured together, with
    these versions of their libraries."""
    file = _kept(target).read()
    return file.pairs.get(draft.digest) if file is not None and file.key == target else None


def save_pair(target: ProfileKey, draft: ProfileKey, found: PairFindings) -> None:
    """Kept with the target's profile, until that is made again. Raises OSError."""

    def added(old: _File | None) -> _File:
        old = old or _File(1, target)
        return replace(old, pairs={**old.pairs, draft.digest: found})

    _kept(target).update(added)


def load_learnt(key: ProfileKey) -> Mapping[str, list[float]]:
    """Returns what live use has learnt, by name; empty where there is nothing. It outlives a change
    of the runtime's library."""
    file = _kept(key).read()
    return {} if file is None else file.learnt


def save_learnt(key: ProfileKey, learnt: Mapping[str, list[float]]) -> None:
    """Adds to what is there; of one name, the last writer's stays. Raises OSError."""

    def added(old: _File | None) -> _File:
        old = old or _File(1, key)
        return replace(old, learnt={**old.learnt, **learnt})

    _kept(key).update(added)


def _kept(key: ProfileKey) -> KeptFile[_File]:
    return KeptFile(key.path, _FILE)

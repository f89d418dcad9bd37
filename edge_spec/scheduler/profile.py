"""What was measured of a model at one place: pass times, and what drafters learnt in use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated

from pydantic import Field, TypeAdapter

from edge_spec.core.model import RuntimeOptions
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.models.model_plan import PreparedModel, joined_types
from edge_spec.models.source import EXPORT_VERSION, Source
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.machine import cpu_name
from edge_spec.storage.measurements import Quantity

MOST_SPREAD = 0.5  # of the least certain median; beyond it the machine was too busy

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsByRows = Annotated[dict[Annotated[int, Field(ge=1)], Seconds], Field(min_length=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def was_busy(spread: float) -> bool:
    return spread > MOST_SPREAD


@dataclass(frozen=True)
class ProfileKey:
    """Everything that a model's measurements depend on. Those that depend on shapes alone leave out
    the model and fill in build, features and shapes (`row_findings.rows_key`)."""

    model: str
    identity: str  # of the model's files
    weights: str  # storage format, such as "int4 block 32"
    runtime: str
    library: str  # its version
    device: str  # "" for the runtime's choice
    threads: int | None  # None for the runtime's choice
    options: tuple[str, ...]  # others that were set, such as "kv_type=f16"
    cpu: str
    kernels: str = ""  # ours, replacing the library's
    export: int = EXPORT_VERSION  # version of conversions
    build: str = ""  # changes with the files of the runtime's library
    features: tuple[str, ...] = ()  # of the processor, which select kernels
    shapes: tuple[int, ...] = ()
    way: str = ""  # of computing, if there are several

    @property
    def digest(self) -> str:
        """Return a hash of the model and how it runs. Snapshots hold it."""
        parts = asdict(self)
        for name in ("build", "features", "shapes", "way"):
            del parts[name]
        if not self.kernels:  # keeps digests from before we had kernels
            del parts["kernels"]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Profile:
    """The time of a model's passes, t(k), as measured by `measure.measure`."""

    seconds: SecondsByRows
    rounds: int  # measurements of every width
    spread: float  # of the least certain median

    @property
    def is_certain(self) -> bool:
        """Return True if the machine was idle enough for the profile to be reused."""
        return not was_busy(self.spread)

    def costs(self) -> RowCosts:
        return RowCosts(self.seconds)


# t(k) of a model at a place that computes correctly, or of all models of its shapes.
SECONDS = Quantity("seconds by rows", ProfileKey, lambda: TypeAdapter(SecondsByRows))
_LEARNT = Quantity("learnt", ProfileKey, lambda: TypeAdapter(dict[str, list[_Finite]]))


def profile_key(source: Source, prepared: PreparedModel) -> ProfileKey:
    options = prepared.how
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
    """Return the options that were set and have no field in a key."""
    apart = (
        *("threads", "providers", "context_length", "prefers_cpu", "may_hold_less"),
        "scored_tokens",  # part of the weights
    )
    return tuple(
        f"{option.name}={getattr(options, option.name)}"
        for option in fields(options)
        if option.name not in apart and getattr(options, option.name) != option.default
    )


def kept_profiles(source: Source) -> Iterator[tuple[ProfileKey, Profile]]:
    """Yield this model's certain profiles on this machine."""
    kept = [each for each in SECONDS.find() if each.key.identity]
    identity = source.identity if kept else ""  # reads the modification times of the model's files
    for found in kept:
        if found.key.identity == identity and not was_busy(found.disturbance):
            yield found.key, Profile(found.value, found.n, found.disturbance)


def stored_weights(prepared: PreparedModel) -> str:
    """Return the stored format that selects kernels."""
    if isinstance(prepared.source, Bundle):
        return prepared.source.manifest.weights
    scored = prepared.scored_tokens
    types = joined_types(prepared.source.weight_types)
    return types if scored is None else f"{types}, {scored}"


def load_profile(key: ProfileKey) -> Profile | None:
    """Return the certain profile for this key, or None."""
    found = SECONDS.read(key)
    if found is None or was_busy(found.disturbance):
        return None
    return Profile(found.value, found.n, found.disturbance)


def save_profile(key: ProfileKey, profile: Profile) -> None:
    """Keep a profile, but never replace a certain one by an uncertain one."""
    if profile.is_certain or load_profile(key) is None:
        SECONDS.keep(key, profile.seconds, profile.rounds, profile.spread)


def load_learnt(key: ProfileKey) -> Mapping[str, list[float]]:
    """Return what drafters learnt in use, by name. Survives updates of the runtime's library."""
    return _LEARNT.known(replace(key, library="")) or {}


def save_learnt(key: ProfileKey, learnt: Mapping[str, list[float]]) -> None:
    """Merge into the store; for one name, the last writer wins."""
    _LEARNT.update(replace(key, library=""), lambda old: {**(old or {}), **learnt})

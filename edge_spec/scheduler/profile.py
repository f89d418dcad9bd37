"""What was measured of a model at one place: the time of its passes, and what use has taught of its
drafters."""

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

MOST_SPREAD = 0.5  # of the least certain median, beyond which the machine was too busy

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsByRows = Annotated[dict[Annotated[int, Field(ge=1)], Seconds], Field(min_length=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def was_busy(spread: float) -> bool:
    """Return whether the machine was too busy for times that are off by this share."""
    return spread > MOST_SPREAD


@dataclass(frozen=True)
class ProfileKey:
    """All that measurements of a model depend on. Those that follow from its shapes alone leave out
    which model it is, and say what else they depend on (`row_findings.rows_key`)."""

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
    build: str = ""  # changes with the files of the runtime's library
    features: tuple[str, ...] = ()  # of the processor, that kernels are chosen by
    shapes: tuple[int, ...] = ()
    way: str = ""  # of computing, where there are several

    @property
    def digest(self) -> str:
        """Changes with the model and with how it is run. Snapshots hold it."""
        parts = asdict(self)
        for name in ("build", "features", "shapes", "way"):
            del parts[name]
        if not self.kernels:  # as it was named before there were kernels of ours
            del parts["kernels"]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Profile:
    """The time of a model's passes, t(k), as `measure.measure` finds it."""

    seconds: SecondsByRows
    rounds: int  # in which every width was measured
    spread: float  # of the least certain median

    @property
    def is_certain(self) -> bool:
        """Return whether the machine was free enough for it to be used again."""
        return not was_busy(self.spread)

    def costs(self) -> RowCosts:
        return RowCosts(self.seconds)


# t(k) of a model at a place that computes right, or of all models of its shapes.
SECONDS = Quantity("seconds by rows", ProfileKey, lambda: TypeAdapter(SecondsByRows))
_LEARNT = Quantity("learnt", ProfileKey, lambda: TypeAdapter(dict[str, list[_Finite]]))


def profile_key(source: Source, prepared: PreparedModel, options: RuntimeOptions) -> ProfileKey:
    """Return what a profile of this model depends on."""
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
    kept = [each for each in SECONDS.find() if each.key.identity]
    identity = source.identity if kept else ""  # which reads the times of the model's files
    for found in kept:
        if found.key.identity == identity and not was_busy(found.disturbance):
            yield found.key, Profile(found.value, found.n, found.disturbance)


def stored_weights(prepared: PreparedModel) -> str:
    """Return what kernels are chosen by, of a model as it is stored."""
    if isinstance(prepared.source, Bundle):
        return prepared.source.manifest.weights
    scored = prepared.scored_tokens
    types = joined_types(prepared.source.weight_types)
    return types if scored is None else f"{types}, {scored}"


def load_profile(key: ProfileKey) -> Profile | None:
    """Return the certain profile that holds for this key; None where there is none."""
    found = SECONDS.read(key)
    if found is None or was_busy(found.disturbance):
        return None
    return Profile(found.value, found.n, found.disturbance)


def save_profile(key: ProfileKey, profile: Profile) -> None:
    """Keep a profile in place of another one, unless it is uncertain and the other one is not."""
    if profile.is_certain or load_profile(key) is None:
        SECONDS.keep(key, profile.seconds, profile.rounds, profile.spread)


def load_learnt(key: ProfileKey) -> Mapping[str, list[float]]:
    """Return what live use has learnt, by name; empty where there is nothing. It outlives a change
    of the runtime's library."""
    return _LEARNT.known(replace(key, library="")) or {}


def save_learnt(key: ProfileKey, learnt: Mapping[str, list[float]]) -> None:
    """Add to what is there; of one name, the last writer's stays."""
    _LEARNT.update(replace(key, library=""), lambda old: {**(old or {}), **learnt})

"""Sampling as a model's makers recommend it and the user asks for it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_spec.core.sampling import SamplingParams
from edge_spec.errors import UsageError

# For a model without recommendations.
DEFAULT_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05)
# The server's API has the same bounds, since its page sends these values.
_LARGEST = {
    "temperature": 2.0,
    "top_k": 2.0**31 - 1,
    "top_p": 1.0,
    "min_p": 1.0,
    "repetition_penalty": 10.0,
}
_SHOWN = {
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "repetition_penalty": "repetition penalty",
}


@dataclass(frozen=True)
class RecommendedSampling:
    """Recommended values by fields of SamplingParams; temperature 0: greedy."""

    stated: Mapping[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # recommended but out of range

    def with_asked(self, asked: Mapping[str, Any]) -> SamplingParams:
        """Override the recommendation with a user's values. Recommended values without a
        temperature are meant for 1; a requested temperature 0 ignores them all. asked: by fields of
        SamplingParams; None: not asked. Raises UsageError."""
        given = {name: value for name, value in asked.items() if value is not None}
        if given.get("temperature") == 0:
            return SamplingParams(**given)
        base: Mapping[str, Any] = vars(DEFAULT_SAMPLING)
        if self.stated:
            base = {"temperature": 1.0, **self.stated}
        return SamplingParams(**{**base, **given})


NOTHING_STATED = RecommendedSampling()


def recommended_sampling(stated: Mapping[str, Any]) -> RecommendedSampling:
    """Keep the usable recommendations; others go to `ignored`. stated: by fields of SamplingParams;
    None and other names are skipped."""
    usable: dict[str, Any] = {}
    ignored: tuple[str, ...] = ()
    for name in _LARGEST:
        value = stated.get(name)
        if value is None:
            continue
        number = _number(name, value)
        if number is None:
            ignored += (f"{_SHOWN[name]} {reprlib.repr(value)}",)
        else:
            usable[name] = number
    return RecommendedSampling(usable, ignored)


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, float) and name == "top_k" and value.is_integer():
        value = int(value)
    try:
        SamplingParams(**{name: value})
    except UsageError:
        return None
    if value > _LARGEST[name]:
        return None
    return int(value) if name == "top_k" else float(value)


def sampling_text(params: SamplingParams) -> str:
    """Describe the values in force, such as "temperature 0.7, top-p 0.95, min-p 0.05"."""
    off = vars(SamplingParams())
    shown = {name: getattr(params, name) for name in _SHOWN}
    if params.greedy:
        shown = {"repetition_penalty": params.repetition_penalty}
    in_force = [f"{_SHOWN[name]} {value:g}" for name, value in shown.items() if value != off[name]]
    return ", ".join([*(["the likeliest token"] if params.greedy else []), *in_force])


def sampling_source(recommended: RecommendedSampling, asked: Mapping[str, Any]) -> str:
    """Describe who chose the values in force."""
    source = "as the model's makers state" if recommended.stated else "edge-spec's defaults"
    given = [_SHOWN[name] for name in _SHOWN if asked.get(name) is not None]
    if not given:
        return source
    told = " and ".join(filter(None, [", ".join(given[:-1]), given[-1]]))
    return "as asked" if asked.get("temperature") == 0 else f"{source}, but {told} as asked"

"""The texts that forecasts are made on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from edge_spec.core.model import Progress
from edge_spec.placement.attempt import attempt
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.place_work import (
    ASKED,
    WRITTEN,
    Asked,
    OnStep,
    Written,
    read_at,
    record_at,
)
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile
from edge_spec.placement.replay import Recording
from edge_spec.text.prompt_files import Prompt

_MOST_TOKENS, _LEAST_TOKENS = 64, 16  # of each recorded answer
_LEAST_TEXTS = 2
_WHAT = "Recording texts"
_READ_S, _WRITE_S = 8.0, 8.0  # for all prompts, and for all answers


def record_texts(
    place: Candidate, prompts: Sequence[Prompt], profile: Profile, progress: Progress
) -> list[Recording]:
    """Greedy answers. The slower the model, the shorter they are, and the fewer of the longest
    prompts are among them; what does not fit the context is cut. Raises PlaceError."""
    chosen = _affordable(place, prompts, profile.prefill_tokens_per_s)
    step_s = profile.costs(TYPICAL_TOKENS).at(1)
    num_tokens = int(_WRITE_S / (step_s * len(chosen)))
    num_tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, num_tokens))
    limit = place.prepared.config.context_length
    asked = tuple(
        _asked(category, tokens[: max(1, limit - num_tokens)], num_tokens, limit)
        for category, tokens in chosen
    )
    request = ASKED.dump_python(asked, mode="json")
    found = attempt(record_at, place, request, partial(progress, _WHAT))
    progress(_WHAT, 1.0)
    return [each.recording for each in WRITTEN.validate_python(found)]


def preferred(
    place: Candidate, recordings: Sequence[Recording], on_step: OnStep
) -> list[list[bool]]:
    """Says for each token of each text whether the model at this place prefers it after the ones
    before. Raises PlaceError."""
    written = WRITTEN.dump_python(tuple(map(Written.of, recordings)), mode="json")
    found: list[list[bool]] = attempt(read_at, place, written, on_step)
    return found


def _asked(category: str, prompt: list[int], num_tokens: int, limit: int) -> Asked:
    return Asked(category, tuple(prompt), min(num_tokens, limit - len(prompt)))


def _affordable(
    place: Candidate, prompts: Sequence[Prompt], tokens_per_s: float
) -> list[tuple[str, list[int]]]:
    """Categories and tokens, the shortest prompts first."""
    encode = place.prepared.text.prompt_of
    found = sorted(((each.category, encode(each.text)) for each in prompts), key=_length)
    total = accumulate(map(_length, found))
    return [
        each
        for i, (each, so_far) in enumerate(zip(found, total, strict=True))
        if i < _LEAST_TEXTS or so_far <= _READ_S * tokens_per_s
    ]


def _length(prompt: tuple[str, list[int]]) -> int:
    return len(prompt[1])

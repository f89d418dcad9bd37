"""The texts that forecasts are made on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from edge_spec.core.model import Progress
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.profile import TYPICAL_TOKENS, Profile
from edge_spec.placement.replay import Recording, record
from edge_spec.text.prompt_files import Prompt

_MOST_TOKENS, _LEAST_TOKENS = 64, 16  # of each recorded answer
_LEAST_TEXTS = 2
_READ_S, _WRITE_S = 8.0, 8.0  # for all prompts, and for all answers


def record_texts(
    place: Candidate, prompts: Sequence[Prompt], profile: Profile, progress: Progress
) -> list[Recording]:
    """Greedy answers. The slower the model, the shorter they are, and the fewer of the longest
    prompts are among them; what does not fit the context is cut. Raises an EdgeSpecError."""
    chosen = _affordable(place, prompts, profile.prefill_tokens_per_s)
    step_s = profile.costs(TYPICAL_TOKENS).at(1)
    num_tokens = int(_WRITE_S / (step_s * len(chosen)))
    num_tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, num_tokens))
    model = place.prepared.open(place.options)
    try:
        session = model.open_session()
        limit = model.config.context_length
        recordings = []
        for i, (category, tokens) in enumerate(chosen):
            progress("Recording texts", i / len(chosen))
            tokens = tokens[: max(1, limit - num_tokens)]
            count = min(num_tokens, limit - len(tokens))
            stop_ids = place.prepared.text.eos_ids
            recordings.append(record(session, tokens, count, stop_ids, category))
        session.close()
    finally:
        model.close()
    progress("Recording texts", 1.0)
    return recordings


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

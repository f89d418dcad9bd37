"""The texts that forecasts are made on."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.bench.prompts import Prompt
from edge_spec.model import Progress
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.replay import Recording, record

_MOST_TOKENS, _LEAST_TOKENS = 64, 16  # of each recorded answer
_RECORD_S = 8.0  # for all of them, after their prompts


def record_texts(
    place: Candidate, prompts: Sequence[Prompt], step_s: float, progress: Progress
) -> list[Recording]:
    """Greedy answers, the shorter the longer a step takes; what does not fit the context is cut.

    Raises an EdgeSpecError.
    """
    affordable = int(_RECORD_S / (step_s * len(prompts)))
    num_tokens = min(_MOST_TOKENS, max(_LEAST_TOKENS, affordable))
    text = place.prepared.text
    chats = text.chat_template is not None
    model = place.prepared.open(place.options)
    try:
        session = model.open_session()
        limit = model.config.context_length
        recordings = []
        for i, prompt in enumerate(prompts):
            progress("Recording texts", i / len(prompts))
            tokens = text.chat_prompt(prompt.text) if chats else text.tokenizer.encode(prompt.text)
            tokens = tokens[: max(1, limit - num_tokens)]
            count = min(num_tokens, limit - len(tokens))
            recordings.append(record(session, tokens, count, text.eos_ids, prompt.category))
        session.close()
    finally:
        model.close()
    progress("Recording texts", 1.0)
    return recordings

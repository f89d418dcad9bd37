"""The texts that weights are fitted to: our own prompts, never the text of the parity check."""

from __future__ import annotations

from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts
from edge_spec.text.tokenizer import Tokenizer

_TOKENS_PER_PROMPT = 128


def calibration_sequences(checkpoint: StoredCheckpoint, max_tokens: int) -> list[list[int]]:
    """Returns the beginnings of prompts of all categories, at most `max_tokens` in all and each
    within the model's context; none where the tokenizer makes nothing of them."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json())
    longest = min(_TOKENS_PER_PROMPT, checkpoint.config.context_length)
    by_category: dict[str, list[str]] = {}
    for prompt in read_prompts(OWN_PROMPTS):
        by_category.setdefault(prompt.category, []).append(prompt.text)
    found: list[list[int]] = []
    for texts in zip(*by_category.values(), strict=True):
        for text in texts:
            tokens = tokenizer.encode(text + "\n")[: min(longest, max_tokens)]
            max_tokens -= len(tokens)
            found += [tokens] if tokens else []
    return found

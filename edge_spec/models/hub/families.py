"""Small models that were published in the same family as larger ones."""

from __future__ import annotations

import re

# Repository of a target -> repository of its draft; of each family the smallest instruct model,
# in the same form (safetensors or GGUF) from the same publisher. What the table says is a
# suggestion: whether the tokens are the same is seen from the files, once they are here.
_FAMILIES = (
    (r"Qwen/Qwen2\.5-(?:1\.5|3|7|14|32|72)B-Instruct(-GGUF)?", r"Qwen/Qwen2.5-0.5B-Instruct\1"),
    (
        r"Qwen/Qwen2\.5-Coder-(?:1\.5|3|7|14|32)B-Instruct(-GGUF)?",
        r"Qwen/Qwen2.5-Coder-0.5B-Instruct\1",
    ),
    (r"Qwen/Qwen3-(?:1\.7|4|8|14|32)B(-GGUF)?", r"Qwen/Qwen3-0.6B\1"),
    (
        r"meta-llama/(?:Meta-)?Llama-3\.(?:1-8B|1-70B|2-3B|3-70B)-Instruct",
        r"meta-llama/Llama-3.2-1B-Instruct",
    ),
    (
        r"(bartowski|unsloth)/(?:Meta-)?Llama-3\.(?:1-8B|1-70B|2-3B|3-70B)-Instruct-GGUF",
        r"\1/Llama-3.2-1B-Instruct-GGUF",
    ),
    (r"HuggingFaceTB/SmolLM2-(?:360M|1\.7B)-Instruct", r"HuggingFaceTB/SmolLM2-135M-Instruct"),
    (
        r"bartowski/SmolLM2-(?:360M|1\.7B)-Instruct-GGUF",
        r"bartowski/SmolLM2-135M-Instruct-GGUF",
    ),
    (r"google/gemma-3-(?:1|4|12|27)b-it", r"google/gemma-3-270m-it"),
    (
        r"google/gemma-3-(?:4|12|27)b-it-qat-q4_0-gguf",
        r"google/gemma-3-1b-it-qat-q4_0-gguf",
    ),
)


def known_draft(repository: str) -> str | None:
    """org/name of a smaller model of the same family, None where the table has none."""
    for target, draft in _FAMILIES:
        match = re.fullmatch(target, repository, re.IGNORECASE)
        if match is not None:
            return match.expand(draft)
    return None

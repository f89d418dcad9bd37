"""Small models that were published in the same family as larger ones, and heads that were trained
for them."""

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


# Repository of a target -> repository of a head that was trained for it, with safetensors. What is
# here was found by searching; none of these heads was tried with this version.
_HEADS = (
    (
        r"meta-llama/(?:Meta-)?Llama-3\.1-8B-Instruct",
        r"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    ),
    (r"Qwen/Qwen3-8B(?:-GGUF)?", r"RedHatAI/Qwen3-8B-speculator.eagle3"),
    (r"Qwen/Qwen3-(1\.7|4)B(?:-GGUF)?", r"AngelSlim/Qwen3-\1B_eagle3"),
    (r"openai/gpt-oss-20b", r"RedHatAI/gpt-oss-20b-speculator.eagle3"),
)


def known_draft(repository: str) -> str | None:
    """org/name of a smaller model of the same family, None where the table has none."""
    return _known(_FAMILIES, repository)


def known_head(repository: str) -> str | None:
    """org/name of a head that was trained for this model, None where the table has none."""
    return _known(_HEADS, repository)


def _known(table: tuple[tuple[str, str], ...], repository: str) -> str | None:
    for target, draft in table:
        match = re.fullmatch(target, repository, re.IGNORECASE)
        if match is not None:
            return match.expand(draft)
    return None

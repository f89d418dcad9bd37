"""Token ids that real, quantized models answer with on llama.cpp.

Kernels for other processors add in another order, so an answer is compared up to the first token
that was nearly another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_spec.models.source import fetch_demo_model
from fixtures.scripts import load_script
from golden.texts import GREEDY, opened

QUESTIONS = (
    "Name the capital of France.",
    "Write a Python function that reverses a list, and one that sorts it.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
)
NEAR_TIE = 0.5  # of log probabilities; kernels for other processors differ by less than half of it


def record() -> dict[str, Any]:
    """Fetches the models where they are not in the cache."""
    models = load_script("real_models")
    return {
        "demo": of_real(fetch_demo_model(_quiet), runtime="llamacpp"),
        "coder-0.5b": of_real(models.fetch("coder-0.5b", _quiet), runtime="llamacpp"),
    }


def of_real(path: Path, **options: Any) -> list[list[list[float]]]:
    """Return ids of a real model's answers, each with how far the second best token was."""
    with opened(path, **options) as llm:
        answers = [
            llm.chat(each, sampling=GREEDY, max_tokens=48, logprobs=2).tokens for each in QUESTIONS
        ]
    return [[[token.id, _margin(token.alternatives)] for token in tokens] for tokens in answers]


def first_difference(
    expected: Sequence[Sequence[Sequence[float]]], got: Sequence[Sequence[int]]
) -> str:
    """Return where an answer parts from the recorded one without a near tie; "" if none does."""
    for number, (answer, ids) in enumerate(zip(expected, got, strict=True)):
        for index, ((token, margin), other) in enumerate(zip(answer, ids, strict=False)):
            if token != other:
                if margin > NEAR_TIE:
                    return f"answer {number}, token {index}: {token} was recorded, {other} came"
                break
    return ""


def ids(answers: Sequence[Sequence[Sequence[float]]]) -> list[list[int]]:
    return [[int(token) for token, _ in answer] for answer in answers]


def _margin(alternatives: Sequence[Any]) -> float:
    return round(alternatives[0].logprob - alternatives[1].logprob, 2)


def _quiet(what: str, fraction: float) -> None:
    pass

"""Makes what a target is asked, so that it writes what its drafter is trained on.

Prompts come from a file, or from the target itself: given the start of a user's message by its chat
template, an instruct model writes one (Xu et al. 2024, Magpie).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import numpy as np

from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.figures import in_loops
from edge_spec.distill.conversations import Conversation
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError

VERSION = 1  # raise it where a task gives another conversation
HELD_OUT = 10  # of this many prompts, one is measured on
_MOST_ANSWERS = 8  # of one prompt, the first greedy, the others drawn
_PROMPT_TOKENS = 192  # of one that the target writes
_LEAST_WORDS = 3
_WRITING = SamplingParams(temperature=0.8, top_p=0.95)
_MARK = "edge-spec-mark"
# What a user's message begins with: most begin freely.
_BEGINNINGS = (
    *("", "", "", "", "Write", "How", "What is", "Explain"),
    *("", "", "", "", "A ", "Who", "Translate", "Write a Python function"),
    *("", "", "", "", "If ", "Give me", "Correct", "Compare"),
)
# What is asked about a text that the target has written.
_REQUESTS = (
    "Summarize: {}",
    "Answer the question with the help of the text.\n\n{}\n\nQuestion: What is this about?",
    "List the main points of this text:\n\n{}",
    "Rewrite this text in simpler words:\n\n{}",
    "Translate to German: {}",
    "Repeat this text and correct its mistakes:\n\n{}",
    "What can be learnt from the following?\n\n{}",
    "Answer the question with the help of the following passage.\n\n[1] {}\n\n"
    "What follows from it?",
)


class Tasks(Protocol):
    """Numbered work that gives a conversation each, and the same one whenever it is done."""

    @property
    def identity(self) -> str:
        """Changes with what the tasks are."""

    @property
    def count(self) -> int | None:
        """Returns the number of tasks; None: as many as are wanted."""

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        """Returns None where nothing worth answering was asked, or where it was stopped."""


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts of a user, each of which is answered several times, in rounds. Held-out ones are
    answered once, as plain greedy decoding does."""

    prompts: Sequence[str]
    max_tokens: int

    def __post_init__(self) -> None:
        """Raises UsageError for fewer than two: some are held out."""
        if len(set(self.prompts)) < 2:
            raise UsageError(
                "one prompt is too little to learn from and to measure on",
                remedy="Give at least two prompts, better some hundreds.",
            )
        # By what they say, which no order of theirs changes: the second of each ten is held out,
        # so that the first few have some of both.
        object.__setattr__(self, "prompts", tuple(sorted(set(self.prompts), key=_digest)))

    @property
    def identity(self) -> str:
        return _digest("\0".join([str(VERSION), str(self.max_tokens), *self.prompts]))

    @property
    def count(self) -> int:
        return len(self.prompts) * _MOST_ANSWERS

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        turn, index = divmod(task, len(self.prompts))
        text = self.prompts[index]
        is_held_out = index % HELD_OUT == 1
        if turn and is_held_out:
            return None
        sampling = SamplingParams()
        if turn:
            sampling = engine.chat_sampling(temperature=0.8, seed=task)
        prompt = engine.parts.text.prompt_of(text)
        return answered(engine, prompt, self.max_tokens, sampling, is_held_out, stop)


@dataclass(frozen=True)
class OwnPrompts:
    """Prompts that the target writes itself. Every fourth is about a text that it has written."""

    max_tokens: int
    seed: int = 0
    count: int | None = None

    @property
    def identity(self) -> str:
        told = [VERSION, self.max_tokens, self.seed, _WRITING, _BEGINNINGS, _REQUESTS]
        return _digest(repr(told))

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        random = np.random.default_rng([self.seed, task])
        beginning = _BEGINNINGS[random.integers(len(_BEGINNINGS))]
        params = SamplingParams(
            temperature=_WRITING.temperature,
            top_p=_WRITING.top_p,
            seed=int(random.integers(1 << 62)),
        )
        asked = _written(engine, _before_message(engine) + beginning, params, stop)
        if asked is None:
            return None
        text = (beginning + asked).strip()
        prompt = engine.chat_prompt(text)
        if task % 4 == 3:
            answer = answered(engine, prompt, self.max_tokens, SamplingParams(), False, stop)
            if answer is None:
                return None
            told = engine.parts.text.tokenizer.decode(answer.tokens[answer.start :].tolist())
            request = _REQUESTS[random.integers(len(_REQUESTS))]
            prompt = engine.chat_prompt(request.format(told.strip()))
        held_out = task % HELD_OUT == HELD_OUT - 1
        return answered(engine, prompt, self.max_tokens, SamplingParams(), held_out, stop)


def require_own_prompts(engine: Engine) -> None:
    """Raises UsageError for a model that cannot write a user's message."""
    if engine.parts.text.chat_template is None or not _before_message(engine):
        raise UsageError(
            f"{engine.name} has no chat template that a user's message can be written by",
            remedy="Give --prompts.",
        )


def _before_message(engine: Engine) -> str:
    """Returns what the chat template writes before a user's message; "" where it leaves it out."""
    text = engine.parts.text.rendered([{"role": "user", "content": _MARK}], ())
    return text.partition(_MARK)[0] if _MARK in text else ""


def _written(engine: Engine, text: str, params: SamplingParams, stop: Event) -> str | None:
    """A message that the target ends itself; None for one that it does not, or hardly begins."""
    tokens = engine.encode(text)
    answer = answered(engine, tokens, _PROMPT_TOKENS, params, False, stop)
    if answer is None or answer.tokens[-1] not in engine.parts.text.eos_ids:
        return None
    message = engine.parts.text.tokenizer.decode(answer.tokens[answer.start :].tolist())
    return message if len(message.split()) >= _LEAST_WORDS else None


def answered(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams,
    is_held_out: bool,
    stop: Event,
) -> Conversation | None:
    """Ends where the answer begins to repeat itself. None where it was stopped, or does not fit the
    context."""
    if len(prompt) + 1 > engine.context_length or not prompt:
        return None
    generation = engine.generate(prompt, stream=True, max_tokens=max_tokens, sampling=sampling)
    for _ in generation:
        if stop.is_set():
            generation.close()
            return None
    answer = [token.id for token in generation.result.tokens]
    loops = in_loops(answer)
    if loops.any():  # every drafter foretells them, `suffix` for nothing
        answer = answer[: int(loops.argmax())]
    if not answer:
        return None
    tokens = np.array([*prompt, *answer], np.int32)
    return Conversation(tokens, len(prompt), is_held_out)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

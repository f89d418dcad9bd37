"""Prompts whose answers a drafter is trained on.

They come from a file or from the target: an instruct model writes a user's message once its chat
template has begun one (Xu et al. 2024, Magpie). A code model is asked to write, change and explain
code, and a few other things.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from threading import Event
from typing import NamedTuple, TypeVar

import numpy as np

from edge_spec.core.sampling import SamplingParams
from edge_spec.diagnostics.bench.report import in_loops
from edge_spec.engine.engine import Engine
from edge_spec.errors import UsageError

VERSION = 2  # increase it if a task yields another conversation
HELD_OUT = 10  # one in this many prompts is held out
_MOST_ANSWERS = 8  # per prompt; the first is greedy, the others sampled
_PROMPT_TOKENS = 192  # of a prompt that the target writes
_LEAST_WORDS = 3
_TEMPERATURE = 0.8  # for prompts that the target writes, and for further answers
_MARK = "edge-spec-mark"
# How a user's message begins; most begin freely.
_BEGINNINGS = (
    *("", "", "", "", "Write", "How", "What is", "Explain"),
    *("", "", "", "", "A ", "Who", "Translate", "Write a Python function"),
    *("", "", "", "", "If ", "Give me", "Correct", "Compare"),
)


@dataclass(frozen=True, eq=False)
class Conversation:
    """A prompt and the target's answer. start: of the answer among the tokens, at least 1.
    is_held_out: for evaluation only."""

    tokens: np.ndarray  # [tokens] int32
    start: int
    is_held_out: bool

    @property
    def num_answered(self) -> int:
        return len(self.tokens) - self.start


class Question(NamedTuple):
    prompt: Sequence[int]
    is_held_out: bool
    sampling: SamplingParams = SamplingParams()


class Tasks(ABC):
    """Numbered questions, reproducible on every machine."""

    max_tokens: int  # of an answer
    count: int | None = None  # number of tasks; None: unlimited

    @property
    def identity(self) -> str:
        """Digest of the tasks, which may quote Python's standard library."""
        return _digest(repr((VERSION, sys.version_info[:3], self)))

    @abstractmethod
    def question(self, engine: Engine, task: int, stop: Event) -> Question | None:
        """Return None if nothing is worth answering, or after a stop."""

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        question = self.question(engine, task, stop)
        return None if question is None else answer(engine, question, self.max_tokens, stop)


class GivenPrompts(Tasks):
    """A user's prompts, answered several times in rounds; held-out ones once, greedily."""

    def __init__(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Raises UsageError for fewer than two prompts: some are held out."""
        if len(set(prompts)) < 2:
            raise UsageError(
                "one prompt is too little to learn from and to measure on",
                remedy="Give at least two prompts, better some hundreds.",
            )
        # Sorted by digest, so that the order in the file does not matter. The second of each ten is
        # held out, so that even a few prompts contain both kinds.
        self.prompts = tuple(sorted(set(prompts), key=_digest))
        self.max_tokens = max_tokens
        self.count = len(self.prompts) * _MOST_ANSWERS

    def __repr__(self) -> str:
        return repr((self.max_tokens, self.prompts))

    def question(self, engine: Engine, task: int, stop: Event) -> Question | None:
        turn, index = divmod(task, len(self.prompts))
        is_held_out = index % HELD_OUT == 1
        if turn and is_held_out:
            return None
        sampling = SamplingParams()
        if turn:
            sampling = engine.chat_sampling(temperature=_TEMPERATURE, seed=task)
        return Question(engine.parts.text.prompt_of(self.prompts[index]), is_held_out, sampling)


@dataclass(frozen=True)
class OwnPrompts(Tasks):
    """Prompts that the target writes itself."""

    max_tokens: int
    seed: int = 0

    def question(self, engine: Engine, task: int, stop: Event) -> Question | None:
        random = np.random.default_rng([self.seed, task])
        beginning = _BEGINNINGS[random.integers(len(_BEGINNINGS))]
        params = SamplingParams(
            temperature=_TEMPERATURE, top_p=0.95, seed=int(random.integers(1 << 62))
        )
        written = _write_message(engine, _before_message(engine) + beginning, params, stop)
        if written is None:
            return None
        prompt = engine.chat_prompt((beginning + written).strip())
        return Question(prompt, task % HELD_OUT == HELD_OUT - 1)


def require_own_prompts(engine: Engine) -> None:
    """Raises UsageError for a model that cannot write a user's message."""
    if engine.parts.text.chat_template is None or not _before_message(engine):
        raise UsageError(
            f"{engine.name} has no chat template that a user's message can be written by",
            remedy="Give --prompts.",
        )


def _before_message(engine: Engine) -> str:
    """Return what the chat template writes before a user's message; "" if it drops that."""
    text = engine.parts.text.rendered([{"role": "user", "content": _MARK}], ())
    return text.partition(_MARK)[0] if _MARK in text else ""


def _write_message(engine: Engine, text: str, params: SamplingParams, stop: Event) -> str | None:
    """Return a message that the target ended itself, if it is long enough."""
    question = Question(engine.encode(text), False, params)
    written = answer(engine, question, _PROMPT_TOKENS, stop)
    if written is None or written.tokens[-1] not in engine.parts.text.eos_ids:
        return None
    message = _text_of(engine, written)
    return message if len(message.split()) >= _LEAST_WORDS else None


def _text_of(engine: Engine, conversation: Conversation) -> str:
    answered = conversation.tokens[conversation.start :].tolist()
    return engine.parts.text.tokenizer.decode(answered)


def answer(engine: Engine, question: Question, max_tokens: int, stop: Event) -> Conversation | None:
    """Return the answer up to its first loop; None after a stop, or if the prompt exceeds the
    context."""
    prompt = question.prompt
    if len(prompt) + 1 > engine.context_length or not prompt:
        return None
    generation = engine.generate(
        prompt, stream=True, max_tokens=max_tokens, sampling=question.sampling
    )
    for _ in generation:
        if stop.is_set():
            generation.close()
            return None
    written = [token.id for token in generation.result.tokens]
    loops = in_loops(written)
    if loops.any():  # every drafter predicts loops, `suffix` at no cost
        written = written[: int(loops.argmax())]
    if not written:
        return None
    return Conversation(np.array([*prompt, *written], np.int32), len(prompt), question.is_held_out)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_KINDS = {"write": 0.4, "change": 0.22, "ask": 0.1, "explain": 0.13, "general": 0.15}
_Item = TypeVar("_Item")
_LEAST_LINES, _MOST_LINES = 5, 36
_MOST_CHARACTERS = 1600


@dataclass(frozen=True)
class PackagedTasks(Tasks):
    """Coding requests made of packaged parts and Python's standard library. Every fourth answer is
    sampled."""

    max_tokens: int
    seed: int = 0

    def question(self, engine: Engine, task: int, stop: Event) -> Question | None:
        is_held_out = task % HELD_OUT == HELD_OUT - 1
        sampling = SamplingParams()
        if task % 4 == 2 and not is_held_out:
            sampling = engine.chat_sampling(temperature=_TEMPERATURE, seed=task)
        return Question(engine.parts.text.prompt_of(self.prompt(task)), is_held_out, sampling)

    def prompt(self, task: int) -> str:
        """Return a task's prompt, the same for the same version of Python."""
        random, parts = np.random.default_rng([self.seed, task]), _parts()
        kind = str(random.choice(list(_KINDS), p=list(_KINDS.values())))
        language = _draw(random, parts["languages"])
        if kind in ("write", "explain"):
            what = _draw(random, parts[kind])
            return _draw(random, parts[f"{kind}_forms"]).format(what=what, language=language)
        if kind == "general":
            form = _draw(random, parts["general_forms"])
            return form.format(_draw(random, parts["general"]))
        request = _draw(random, parts[kind]).format(language=language)
        code = _draw(random, library_functions())
        form = _draw(random, parts["code_forms"])
        return form.format(request=request, code=code, tag="python")


def _draw(random: np.random.Generator, items: Sequence[_Item]) -> _Item:
    return items[int(random.integers(len(items)))]


@cache
def _parts() -> dict[str, list[str]]:
    text = files("edge_spec.distill").joinpath("packaged_tasks.json").read_text("utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found


@cache
def library_functions() -> tuple[str, ...]:
    """Return functions of Python's standard library: varied code without a download."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for module in sorted(sys.stdlib_module_names):
        path = folder / f"{module}.py"
        if path.is_file():  # else a package or a compiled module
            found.update(dict.fromkeys(functions_of(path.read_text("utf-8"))))
    return tuple(found)


def functions_of(source: str) -> Iterator[str]:
    """Yield a file's medium-sized functions and methods, dedented."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.lineno - 1
            code = dedent("\n".join(lines[first : node.end_lineno])).strip()
            is_short = _LEAST_LINES <= node.end_lineno - first <= _MOST_LINES
            if is_short and len(code) <= _MOST_CHARACTERS:
                yield code

"""Asks a target what people ask a model that programs: to write code, to change and to explain
given code, to explain what programmers talk about, and some of everything else."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from threading import Event
from typing import TypeVar

import numpy as np

from edge_spec.core.sampling import SamplingParams
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.prompts import HELD_OUT, answered
from edge_spec.distill.source_functions import SourceFunction, library_functions
from edge_spec.engine.engine import Engine

VERSION = 1  # raise it where a task gives another prompt
_KINDS = {"write": 0.4, "change": 0.22, "ask": 0.1, "explain": 0.13, "general": 0.15}
# Of a user's functions, which the answers are to be like.
_KINDS_OF_GIVEN = {
    **{"change": 0.3, "ask": 0.2, "document": 0.08, "test": 0.1, "complete": 0.1, "fix": 0.07},
    **{"write": 0.08, "explain": 0.04, "general": 0.03},
}
_LEAST_APART = 20  # functions, of which some are held out
_Item = TypeVar("_Item")
_TEMPERATURE = 0.8  # of what is asked again in other words: every fourth


@dataclass(frozen=True)
class PackagedTasks:
    """Prompts that are put together of packaged parts; given code is of Python's own library.

    functions: those of a user, which take the library's place, and of which most is asked. Where
    there are many, held-out prompts are about others than those that are learnt from.
    """

    max_tokens: int
    seed: int = 0
    functions: tuple[SourceFunction, ...] = ()
    count: int | None = None

    @property
    def identity(self) -> str:
        told: list[object] = [VERSION, self.max_tokens, self.seed, _parts(), self.functions]
        told.append(_KINDS_OF_GIVEN if self.functions else (_KINDS, sys.version_info[:3]))
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        prompt = engine.parts.text.prompt_of(self.prompt(task))
        is_held_out = _is_held_out(task)
        sampling = SamplingParams()
        if task % 4 == 2 and not is_held_out:
            sampling = engine.chat_sampling(temperature=_TEMPERATURE, seed=task)
        return answered(engine, prompt, self.max_tokens, sampling, is_held_out, stop)

    def prompt(self, task: int) -> str:
        """Returns the same text for the same number, on every machine with the same functions."""
        draw = _Draw(self.seed, task)
        kind = draw.weighted(_KINDS_OF_GIVEN if self.functions else _KINDS)
        parts = _parts()
        language = draw.one(parts["languages"])
        if self.functions:  # such as are written there
            language = draw.one(self.functions).language or language
        if kind == "write":
            what = draw.one(parts["write"])
            return draw.one(parts["write_forms"]).format(what=what, language=language)
        if kind == "explain":
            what = draw.one(parts["explain"])
            return draw.one(parts["explain_forms"]).format(what=what, language=language)
        if kind == "general":
            return draw.one(parts["general_forms"]).format(draw.one(parts["general"]))
        request = draw.one(parts[kind])
        function = draw.one(self._functions_for(task))
        while function.language != "python" and request in parts["python_only"]:
            request = draw.one(parts[kind])
        code = _shown(function.code, kind, draw)
        form = draw.one(parts["code_forms"])
        told = request.format(language=language)
        return form.format(request=told, code=code, tag=function.language)

    def _functions_for(self, task: int) -> Sequence[SourceFunction]:
        if not self.functions:
            return library_functions()
        if len(self.functions) < _LEAST_APART:
            return self.functions
        num_held_out = len(self.functions) // HELD_OUT
        held_out = self.functions[:num_held_out]  # neighbours: of one file, mostly
        return held_out if _is_held_out(task) else self.functions[num_held_out:]


def _is_held_out(task: int) -> bool:
    return task % HELD_OUT == HELD_OUT - 1


def _shown(code: str, kind: str, draw: _Draw) -> str:
    """Returns the beginning of code that is to be completed, and code that is to be mended without
    one of its lines."""
    lines = code.splitlines()
    if kind == "complete":
        return "\n".join(lines[: max(2, len(lines) // 3)])
    if kind == "fix":
        telling = [at for at in range(1, len(lines) - 1) if len(lines[at].split()) > 1]
        left_out = draw.one(telling or range(len(lines)))
        return "\n".join(lines[:left_out] + lines[left_out + 1 :])
    return code


class _Draw:
    def __init__(self, seed: int, task: int) -> None:
        self._random = np.random.default_rng([seed, task])

    def one(self, items: Sequence[_Item]) -> _Item:
        return items[int(self._random.integers(len(items)))]

    def weighted(self, weights: dict[str, float]) -> str:
        return str(self._random.choice(list(weights), p=list(weights.values())))


@cache
def _parts() -> dict[str, list[str]]:
    text = files("edge_spec.distill").joinpath("packaged_tasks.json").read_text("utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found

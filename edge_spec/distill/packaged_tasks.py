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
from edge_spec.distill.source_functions import library_functions
from edge_spec.engine.engine import Engine

VERSION = 1  # raise it where a task gives another prompt
_KINDS = {"write": 0.4, "change": 0.22, "ask": 0.1, "explain": 0.13, "general": 0.15}
_Item = TypeVar("_Item")
_TEMPERATURE = 0.8  # of what is asked again in other words: every fourth


@dataclass(frozen=True)
class PackagedTasks:
    """Prompts that are put together of packaged parts; given code is of Python's own library."""

    max_tokens: int
    seed: int = 0
    count: int | None = None

    @property
    def identity(self) -> str:
        told = [VERSION, self.max_tokens, self.seed, _parts(), _KINDS, sys.version_info[:3]]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def conversation(self, engine: Engine, task: int, stop: Event) -> Conversation | None:
        prompt = engine.parts.text.prompt_of(self.prompt(task))
        is_held_out = task % HELD_OUT == HELD_OUT - 1
        sampling = SamplingParams()
        if task % 4 == 2 and not is_held_out:
            sampling = engine.chat_sampling(temperature=_TEMPERATURE, seed=task)
        return answered(engine, prompt, self.max_tokens, sampling, is_held_out, stop)

    def prompt(self, task: int) -> str:
        """Returns the same text for the same number, on every machine with the same Python."""
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

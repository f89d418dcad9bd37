"""Asks a target what people ask a model that programs: to write code, to change and to explain
given code, to explain what programmers talk about, and some of everything else."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from threading import Event
from typing import TypeVar

import numpy as np

from edge_spec.core.sampling import SamplingParams
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.prompts import HELD_OUT, answered
from edge_spec.engine.engine import Engine

VERSION = 1  # raise it where a task gives another prompt
_KINDS = {"write": 0.4, "change": 0.22, "ask": 0.1, "explain": 0.13, "general": 0.15}
_Item = TypeVar("_Item")
_TEMPERATURE = 0.8  # of what is asked again in other words: every fourth
_LEAST_LINES, _MOST_LINES = 5, 36
_MOST_CHARACTERS = 1600
# Of every Python's library: code of many hands and kinds, which nobody has to fetch.
_MODULES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "cmd", "configparser", "csv"),
    *("datetime", "difflib", "email/message", "email/utils", "enum", "fnmatch", "fractions"),
    *("functools", "getpass", "glob", "gzip", "heapq", "html/parser", "http/client"),
    *("http/cookiejar", "http/server", "imaplib", "inspect", "ipaddress", "json/decoder"),
    *("json/encoder", "locale", "logging/__init__", "logging/handlers", "mailbox", "mimetypes"),
    *("netrc", "optparse", "os", "pathlib", "pdb", "pickletools", "platform", "plistlib"),
    *("poplib", "posixpath", "pprint", "profile", "queue", "random", "sched", "selectors"),
    *("shelve", "shlex", "shutil", "smtplib", "socketserver", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize"),
    *("traceback", "turtle", "unittest/case", "urllib/parse", "urllib/request", "uuid"),
    *("venv/__init__", "wave", "webbrowser", "xml/dom/minidom", "zipfile"),
)


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


@cache
def library_functions() -> tuple[str, ...]:
    """Returns functions of the standard library of the Python that runs."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for module in _MODULES:
        path = folder / f"{module}.py"
        if path.is_file():  # another version may have a package in its place, or nothing
            found.update(dict.fromkeys(functions_of(path.read_text("utf-8"))))
    return tuple(found)


def functions_of(source: str) -> Iterator[str]:
    """Yields the functions and methods of a Python file that are neither tiny nor long, as they are
    written, without their indentation."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.lineno - 1
            code = dedent("\n".join(lines[first : node.end_lineno])).strip()
            is_short = _LEAST_LINES <= node.end_lineno - first <= _MOST_LINES
            if is_short and len(code) <= _MOST_CHARACTERS:
                yield code

"""The requests of a coding agent: what a client sends, turn after turn, while a model works on a
repository with tools.

Written by hand, not by a model, and the same each time: what a model answers is not sent back, so
that any server can be given the same requests. The thoughts, calls and results in them are those of
the record. Now and then the user speaks, an old result is cleared, or the date in the system prompt
changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVERY_ASKED, CLEARED_AT, DATED_AT = 8, 13, 22  # turns
CLEARED = "[An old result, cleared to save room.]"
_RULES = (
    "Look before you change: read a file before you edit it.",
    "Change as little as the task needs, and keep the style of the file.",
    "Run the tests after each change, and read what they print.",
    "When a call fails, say why, and try another way.",
    "Never invent the content of a file.",
    "When the task is done, say in two sentences what was changed.",
)
_TASKS = (
    "Find out why the cache is read again after a restart, and mend it.",
    "Now name the bound after what it bounds, and say so in the docs.",
    "Add a test that fails without the change.",
    "Look whether another module relies on the old name.",
)
_THOUGHTS = (
    "The next thing to know is what {path} does with it. I read it first.",
    "That is not where the bytes are counted. {path} may be the place.",
    "The test named one function. It is used in {path}, too.",
)


@dataclass(frozen=True)
class Turn:
    """One request. what: begins, goes on with a result, is asked something, has an old result
    cleared, or another date."""

    what: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]


def agent_run(
    files: Sequence[tuple[str, str]], num_turns: int = 30, thinks: bool = True
) -> list[Turn]:
    """files: paths and contents, which the agent reads one after the other. thinks: whether its
    messages have thoughts, which templates drop once the user speaks again."""
    tools = [_tool(*each) for each in _TOOLS]
    messages = [_system("2026-11-26"), {"role": "user", "content": _TASKS[0]}]
    turns = []
    for number in range(num_turns):
        what = "begins" if not number else "goes on"
        if number:
            messages = [*messages, *_step(number, files, thinks)]
        if number and number % EVERY_ASKED == 0:
            what = "is asked"
            messages = [*messages, *_asked(number)]
        if number == CLEARED_AT:
            what = "is cleared"
            messages = _cleared(messages)
        if number == DATED_AT:
            what = "is dated"
            messages = [_system("2026-11-27"), *messages[1:]]
        turns.append(Turn(what, messages, tools))
    return turns


def _system(date: str) -> dict[str, Any]:
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_RULES, 1))
    text = f"You are a careful programmer who works with tools.\n{rules}\nToday is {date}."
    return {"role": "system", "content": text}


def _step(number: int, files: Sequence[tuple[str, str]], thinks: bool) -> list[dict[str, Any]]:
    """Returns a message that calls a tool, and its result."""
    path, content = files[number % len(files)]
    reads = number % 3 != 2
    name = "read_file" if reads else "run_tests"
    arguments = {"path": path} if reads else {"path": path, "verbose": False}
    call_id = f"call{number:05}"
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if thinks:
        said["reasoning_content"] = _THOUGHTS[number % len(_THOUGHTS)].format(path=path)
    result = content if reads else f"{path}: 12 passed, 1 failed in turn {number}"
    return [said, {"role": "tool", "tool_call_id": call_id, "content": result}]


def _asked(number: int) -> list[dict[str, Any]]:
    task = _TASKS[number // EVERY_ASKED % len(_TASKS)]
    done = {"role": "assistant", "content": "The test passes now. The bound is in one place."}
    return [done, {"role": "user", "content": task}]


def _cleared(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clears the first results, as clients do whose context fills."""
    results = [each for each in messages if each["role"] == "tool"]
    old = {id(each) for each in results[: len(results) // 3]}
    return [{**each, "content": CLEARED} if id(each) in old else each for each in messages]


_TOOLS = (
    ("read_file", "Reads a text file of the repository.", {"path": "string"}),
    ("list_files", "Lists the files below a directory.", {"path": "string", "depth": "integer"}),
    ("search", "Finds lines that match.", {"pattern": "string", "path": "string"}),
    ("edit_file", "Replaces a text.", {"path": "string", "old": "string", "new": "string"}),
    ("run_tests", "Runs the tests of a path.", {"path": "string", "verbose": "boolean"}),
    ("run_command", "Runs a command in a shell.", {"command": "string", "timeout_s": "integer"}),
)


def _tool(name: str, description: str, kinds: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}

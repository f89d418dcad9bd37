"""Command lines of the workflow and of the pages for Apple and mobile devices exist as written.

They run where this suite does not, so that nobody would notice an option that was renamed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from edge_spec.cli.main import app

ROOT = Path(__file__).parents[2]
FILES = (".github/workflows/macos.yml", "docs/apple.md", "docs/mobile.md")
FENCE = re.compile(r"```sh\n(.*?)```", re.DOTALL)
RUN = re.compile(r"^(?: *-? *run: )?(.*)$")  # a step of a workflow, or a line of its block


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """File and words of each call of edge-spec or Python."""
    for name in FILES:
        text = (ROOT / name).read_text("utf-8")
        lines = "".join(FENCE.findall(text)) if name.endswith(".md") else text
        for line in lines.splitlines():
            match = RUN.match(line)
            assert match is not None
            for part in match[1].split("&&"):
                words = shlex.split(part, comments=True) if "$" not in part else []
                if words and Path(words[0]).name in ("edge-spec", "python"):
                    yield name, [Path(words[0]).name, *words[1:]]


LINES = list(command_lines())


@pytest.mark.parametrize("words", [words for _, words in LINES], ids=shlex.join)
def test_a_documented_command_line_is_understood(words: list[str]) -> None:
    if words[0] == "python":
        wanted = [word for word in words[1:] if "/" in word]
        assert all((ROOT / word).exists() for word in wanted)
        return
    command: Any = typer.main.get_command(app)
    # Raises for options that it does not know, values of another type and arguments that lack.
    command.commands[words[1]].make_context(words[1], words[2:])


def test_the_workflow_and_both_pages_have_commands() -> None:
    """A change of their layout must not leave the test above without lines."""
    found = [name for name, words in LINES if words[0] == "edge-spec"]
    assert all(found.count(name) >= 4 for name in FILES)

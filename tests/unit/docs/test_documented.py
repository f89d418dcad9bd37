"""Every block of README and docs is run by a test or says why not; commands exist as written.

Blocks are run by tests/e2e/test_documented.py; tests/fixtures/documented.py has the marks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from edge_spec.cli.main import app, run
from fixtures import documented

ROOT = Path(__file__).parents[3]
WORKFLOW = ".github/workflows/macos.yml"
RUN = re.compile(r"^(?: *-? *run: )?(.*)$")  # a step of a workflow, or a line of its block
# Code in a text: only options are looked up there, since the rest is often shortened.
IN_TEXT = re.compile(r"`edge-spec ([a-z][a-z-]*)([^`]*)`")
SHARED = "## Options of "  # of several commands, with a table
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


BLOCKS: list[Any] = documented.blocks()
COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_a_block_is_run_or_says_why_not(block: Any) -> None:
    remedy = (
        f'{block.where}: a block of the language "{block.language}" that nothing runs. Write '
        "`<!-- run by tests/FILE.py -->` or `<!-- not run: REASON -->` on the line before it, with "
        f"one of {documented.REASONS}; or give it one of the languages {documented.RUN_HERE}, and "
        "tests/e2e/test_documented.py runs it"
    )
    if block.reason is not None:
        assert block.reason in documented.REASONS, remedy
    elif block.test is not None:
        test = ROOT / block.test
        assert test.is_file(), f"{block.where}: {block.test} is not there"
        assert Path(block.page).name in test.read_text("utf-8"), (
            f"{block.where}: {block.test} does not name the page, so it hardly runs the block"
        )
    else:
        assert block.language in documented.RUN_HERE, remedy


def test_a_mark_stands_on_the_line_before_its_block() -> None:
    """Elsewhere, or misspelt, it would do nothing, and nobody would see it."""
    for page in documented.pages():
        name = page.relative_to(ROOT).as_posix()
        marks = re.findall(r"^ *<!-- *(?:not )?run\b.*$", page.read_text("utf-8"), re.MULTILINE)
        marked = [block for block in BLOCKS if block.page == name and not block.runs_here]
        assert len(marks) == len(marked), f"{name}: {marks}"


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """File and words of each call of edge-spec or Python that no test runs."""
    unrun = [
        (block.where, block.text)
        for block in BLOCKS
        if block.reason not in (None, "an excerpt") and block.language in ("", "sh")
    ]
    for where, text in [*unrun, (WORKFLOW, (ROOT / WORKFLOW).read_text("utf-8"))]:
        for line in text.replace("\\\n", " ").splitlines():
            match = RUN.match(line)
            assert match is not None
            for part in match[1].split("&&"):
                command = part.partition(" > ")[0]
                words = shlex.split(command, comments=True) if "$" not in part else []
                if words and Path(words[0]).name in ("edge-spec", "python"):
                    yield where, [Path(words[0]).name, *words[1:]]


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "words"), LINES, ids=lambda value: shlex.join([*value]))
def test_a_command_line_that_is_not_run_is_understood(where: str, words: list[str]) -> None:
    if words[0] == "python":
        wanted = [word for word in words[1:] if "/" in word]
        assert all((ROOT / word).exists() for word in wanted), where
        return
    # Raises for options that it does not know, values of another type and arguments that lack.
    COMMANDS[words[1]].make_context(words[1], words[2:])


def test_the_workflow_and_the_pages_for_other_devices_have_commands() -> None:
    """A change of their layout must not leave the test above without lines."""
    found = [where.partition(":")[0] for where, words in LINES if words[0] == "edge-spec"]
    for name in (WORKFLOW, "docs/apple.md", "docs/mobile.md"):
        assert found.count(name) >= 2, name


@pytest.mark.parametrize("page", documented.pages(), ids=lambda page: page.name)
def test_options_named_in_a_text_exist(page: Path) -> None:
    for name, rest in IN_TEXT.findall(page.read_text("utf-8")):
        assert name in COMMANDS, f"{page.name}: edge-spec {name}"
        taken = {option for each in COMMANDS[name].params for option in [*each.opts]}
        taken |= {option for each in COMMANDS[name].params for option in each.secondary_opts}
        unknown = set(OPTION.findall(rest)) - taken - {"--help"}
        assert not unknown, f"{page.name}: edge-spec {name} has no {unknown}"


def test_options_of_several_commands_are_of_all_that_are_named() -> None:
    """A row says which of them lack its options, or which one alone has them."""
    section = (ROOT / "docs/cli.md").read_text("utf-8").partition(SHARED)[2].partition("\n## ")[0]
    heading, *lines = section.splitlines()
    sharing = set(re.findall(r"\w+", heading)) - {"and"}
    rows = [line.strip("| ").split(" | ", 1) for line in lines if line.startswith("| `")]
    assert len(sharing) == 6 and len(rows) > 20
    for first, meaning in rows:
        lacking = set(re.findall(r"`(\w+)`", meaning.partition("not of")[2]))
        alone = re.match(r"`(\w+) --", first)
        for name in [alone[1]] if alone else sharing - lacking:
            taken = {option for each in COMMANDS[name].params for option in each.opts}
            assert set(OPTION.findall(first)) <= taken, f"{name} has not all of {first}"
        for name in lacking & sharing:
            taken = {option for each in COMMANDS[name].params for option in each.opts}
            assert not taken & set(OPTION.findall(first)), f"{name} has some of {first}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_all_that_is_written(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for backticks: nothing in it is taken for markup."""
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    helps = [getattr(each, "help", None) or "" for each in COMMANDS[name].params]
    for text in (*(COMMANDS[name].help or "").split("\n\n"), *helps):
        assert " ".join(text.replace("`", "").split()) in shown

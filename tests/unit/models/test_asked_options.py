"""Each option of loading is declared once: the command line, `load` and the docs have it from
there, and what it says of who understands it is so."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import edge_spec
from edge_spec.cli.main import app
from edge_spec.core import entry_points
from edge_spec.drafters import factory
from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions, Option, declared_options
from edge_spec.models.options import LoadOptions
from fixtures import documented

ROOT = Path(__file__).parents[3]
OPTIONS = declared_options(AskedOptions)
COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
LOADING = ("generate", "chat", "serve", "desktop", "bench", "verify")


def parameters(command: str) -> dict[str, click.Parameter]:
    return {each.name or "": each for each in COMMANDS[command].params}


def test_every_field_is_declared_and_no_flag_is_taken_twice() -> None:
    assert list(OPTIONS) == [field.name for field in fields(AskedOptions)]
    flags = [each.flag for each in OPTIONS.values()]
    assert len(set(flags)) == len(flags)
    assert all(each.help.strip() == each.help for each in OPTIONS.values())


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.parametrize("declared", OPTIONS.values(), ids=lambda each: each.name)
def test_a_command_takes_it_as_it_is_declared(command: str, declared: Option) -> None:
    taken: Any = parameters(command)[declared.name]
    assert declared.flag in taken.opts
    assert taken.help == declared.help
    assert taken.rich_help_panel == declared.panel
    assert taken.default in (declared.default, None)


@pytest.mark.parametrize("opening", [edge_spec.load, edge_spec.load_async])
def test_load_takes_it_as_it_is_declared(opening: Any) -> None:
    taken = inspect.signature(opening).parameters
    assert list(taken) == ["model", *OPTIONS, "progress"]
    for name, declared in OPTIONS.items():
        assert taken[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert (taken[name].annotation, taken[name].default) == (declared.type, declared.default)
        assert f"{name}: {declared.help}" in opening.__doc__


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("treads", "threads, which is --threads"),
        *(
            (flag, f"{name}, which is {each.flag}")
            for name, each in OPTIONS.items()
            if (flag := each.flag[2:].replace("-", "_")) != name
        ),
    ],
)
def test_an_option_that_load_does_not_have_is_refused_with_the_one_that_is_meant(
    unknown: str, meant: str
) -> None:
    with pytest.raises(UsageError) as refused:
        edge_spec.load("smollm2", **{unknown: 2})  # type: ignore[arg-type]
    assert str(refused.value) == (
        f"load has no option '{unknown}'. Did you mean {meant} on the command line?"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"threads": 0}, "threads is 0. It has to be 1 or more."),
        ({"context_length": -1}, "context is -1. It has to be 1 or more."),
        ({"call_timeout_s": 0.0}, "call-timeout is 0.0. It has to be above 0 seconds."),
        ({"draft_overlap": "sometimes"}, "--draft-overlap is 'sometimes'. Choose: auto, on, of"),
        ({"jacobi": "guess"}, "--jacobi is 'guess'. Choose: random, repeat"),
        ({"lookahead": "2,3"}, ""),
        ({"rpc": ["nowhere"]}, "'nowhere' is no address of a server"),
        ({"corpora": ["a.txt"], "drafter": "suffix"}, "--corpus would not be used by --drafter"),
        ({"exit_layer": 2}, "--exit-layer would not be used by --drafter auto. Add early-exit"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_bad_value_is_refused_in_one_line(given: Any, told: str) -> None:
    """Before the model is looked at."""
    with pytest.raises(UsageError) as refused:
        edge_spec.load("no-such-model", draft="none", **given)
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_layers", 1),
        ("kv_type", "f16"),
        ("mmap", False),
        ("flash_attention", False),
        ("rpc", ("a:1",)),
    ],
)
def test_what_only_some_runtimes_understand_the_others_refuse(name: str, value: Any) -> None:
    assert OPTIONS[name].runtimes
    given: Any = {name: value}
    opened = LoadOptions(**given).runtime_options
    for runtime in sorted({"ort", "reference", "coreml"} - {*OPTIONS[name].runtimes}):
        with pytest.raises(UsageError, match=f"{runtime} has no option"):
            runtimes.load_runtime(runtime).open(None, opened)


def test_who_is_said_to_understand_an_option_exists() -> None:
    for declared in OPTIONS.values():
        assert set(declared.drafters) <= set(entry_points.names("drafters"))
        assert set(declared.runtimes) <= set(entry_points.names("runtimes"))


def test_the_drafters_that_an_option_names_are_those_that_declare_it() -> None:
    traits = factory.installed_traits()
    for name, declared in OPTIONS.items():
        if declared.drafters:
            users = {each for each, known in traits.items() if known.uses(name)}
            assert users == set(declared.drafters), name


def test_the_option_of_the_contributing_page_touches_one_file(tmp_path: Path) -> None:
    """The example of CONTRIBUTING.md, written into a copy of the declaration."""
    page = [block for block in documented.blocks() if block.page == "CONTRIBUTING.md"]
    (example,) = (block.text for block in page if block.test and __file__.endswith(block.test))
    shutil.copytree(ROOT / "edge_spec", tmp_path / "edge_spec")
    declaration = tmp_path / "edge_spec/models/asked_options.py"
    text = declaration.read_text("utf-8")
    group = re.compile(r'(class AskedOptions:\n    """[^"]*"""\n\n)')
    indented = "".join(f"    {line}" for line in example.splitlines(keepends=True))
    declaration.write_text(group.sub(lambda found: found[1] + indented, text), "utf-8")
    seen = """
import inspect, runpy, sys, typer
import edge_spec
from edge_spec.cli.main import app
assert edge_spec.__file__.startswith(sys.argv[1]), edge_spec.__file__
print(inspect.signature(edge_spec.load).parameters["pause_s"])
command = typer.main.get_command(app).commands["generate"]
print([each.help for each in command.params if "--pause" in each.opts])
print([row for row in runpy.run_path(sys.argv[2])["table"]().splitlines() if "--pause" in row])
"""
    command = [sys.executable, "-c", seen, str(tmp_path), str(ROOT / "docs/make_cli_tables.py")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "pause_s: float | None = None",
        "['Seconds of rest after each round.']",
        "['| `--pause SECONDS` | `pause_s` | Seconds of rest after each round. Default: none. |']",
    ]

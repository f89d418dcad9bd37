"""The blocks of README and docs that have no mark run as they stand there.

Of each page all Python blocks run one after the other in one namespace, all command lines in one
directory, in which the models that pages speak of are tiny ones. JSON and TOML are read.
tests/unit/docs/test_documented.py holds that every other block says who runs it, or why nothing
does.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures import documented, tiny_models

ROOT = Path(__file__).parents[2]
FIRST = ("README.md", "docs/cli.md")
MESSAGE = "Hello\n"  # on the standard input of every command
EXPECTED = {  # of what the Python blocks of a page print
    "docs/use.md": ["Paris", '{"name": "', "cancelled", "tokens were in the cache"],
    "docs/serve.md": ["http://127.0.0.1:"],
    "docs/how-it-works.md": ["True ()"],
}


BLOCKS = [block for block in documented.blocks() if block.runs_here]


def pages(language: str) -> list[str]:
    return sorted({block.page for block in BLOCKS if block.language == language})


def marked(pages: list[str]) -> list[Any]:
    """All but those that are read first are slow."""
    return [pytest.param(page, marks=() if page in FIRST else pytest.mark.slow) for page in pages]


def of(page: str, language: str) -> list[Any]:
    return [block for block in BLOCKS if (block.page, block.language) == (page, language)]


@pytest.fixture
def folder(tmp_path: Path, command: list[str]) -> Path:
    """What pages take to be there: models by their names, and the repository's scripts."""
    for name, seed in (("target", 0), ("model", 0), ("big", 0), ("draft", 1), ("small", 1)):
        model = tiny_models.build("llama", seed, max_position_embeddings=1024)
        model.weights["lm_head.weight"][model.config["eos_token_id"]] *= 4  # answers are short
        tiny_models.write_gguf(model, tmp_path / f"{name}.gguf")
        tiny_models.write_hf(model, tmp_path / name)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("edge-spec", command[1:]), ("python", [])):
        words = shlex.join([sys.executable, *arguments])
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


@pytest.mark.model
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("page", marked(pages("sh")))
def test_the_commands_of_a_page_succeed(page: str, folder: Path, edge_spec: object) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    for block in of(page, "sh"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            input=MESSAGE,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PATH": path},
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{block.where}: {done.stderr}"


@pytest.mark.model
@pytest.mark.parametrize("page", marked(pages("python")))
def test_the_python_of_a_page_runs(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in of(page, "python"):
        lines = "\n" * block.line + block.text  # so that a traceback shows the page's line
        exec(compile(lines, block.page, "exec"), names)
    said = capsys.readouterr().out
    assert not [text for text in EXPECTED.get(page, []) if text not in said], said


@pytest.mark.parametrize(
    ("language", "read"), [("json", json.loads), ("toml", tomllib.loads)], ids=["json", "toml"]
)
def test_examples_of_data_are_well_formed(language: str, read: Callable[[str], object]) -> None:
    for block in BLOCKS:
        if block.language == language:
            read(block.text)


def test_pages_whose_output_is_known_have_examples() -> None:
    """Blocks that lost their language would not be looked for in the output."""
    assert set(EXPECTED) <= set(pages("python"))

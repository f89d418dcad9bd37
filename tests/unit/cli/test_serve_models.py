"""`edge-spec serve MODEL MODEL`: what is refused before any model is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.cli.answering import ServeOptions
from edge_spec.cli.main import run
from edge_spec.errors import UsageError

pytest.importorskip("uvicorn")


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["a.gguf", "missing.gguf"], 1, "no such file or directory: missing.gguf"),
        (["a.gguf", "other/a.gguf"], 2, "two models are called 'a'"),
        (["a.gguf", "b.gguf", "--alias", "small"], 2, "does not say of which model"),
        (["a.gguf", "--alias", "small=c"], 2, "no model of this server is 'c'"),
        (["a.gguf", "b.gguf", "--max-models", "0"], 2, "'--max-models': Input should be"),
        (["a.gguf", "b.gguf", "--load-timeout", "0"], 2, "'--load-timeout': Input should be"),
        (["a.gguf", "b.gguf", "--stdio"], 2, "--stdio serves one model"),
    ],
)
def test_a_mistake_ends_in_one_line(
    arguments: list[str],
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    Path("other").mkdir()
    for name in ("a.gguf", "b.gguf", "other/a.gguf"):
        Path(name).touch()
    assert run(["serve", *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_options_of_the_server_are_not_looked_at_with_stdio() -> None:
    assert ServeOptions(stdio=True, host="0.0.0.0", api_key="").stdio
    with pytest.raises(UsageError, match="other machines reach"):
        ServeOptions(host="0.0.0.0")

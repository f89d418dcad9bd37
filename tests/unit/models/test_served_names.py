"""What a server calls its models, before any of them is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.errors import ModelFileError, UsageError
from edge_spec.models.source import served_names


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """MODELs by a short name; two of them are called the same."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    paths = {"a": "a.gguf", "b": "b.gguf", "one": "one/model.gguf", "two": "two/model.gguf"}
    for path in paths.values():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    return {name: str(tmp_path / path) for name, path in paths.items()}


def test_models_have_their_own_names(files: dict[str, str]) -> None:
    hub = ["hf:org/chat", "hf:org/chat-GGUF:chat.Q4_0.gguf"]  # not fetched, and not asked for
    names = served_names(["smollm2", files["a"], *hub], [])
    assert names == [("smollm2",), ("a",), ("chat",), ("chat.Q4_0",)]


def test_an_alias_goes_before_the_own_name(files: dict[str, str]) -> None:
    assert served_names([files["a"]], ["small"]) == [("small", "a")]
    models, aliases = [files["a"], files["b"]], ["small=a", f"large={files['b']}", "tiny=a"]
    assert served_names(models, aliases) == [("small", "tiny", "a"), ("large", "b")]
    assert served_names([files["a"]], ["a=a"]) == [("a",)]


def test_models_of_the_same_name_are_told_apart_by_an_alias(files: dict[str, str]) -> None:
    models = [files["one"], files["two"]]
    with pytest.raises(UsageError, match=r"two models are called 'model'\. .*--alias NAME=MODEL"):
        served_names(models, [])
    # The own name says nothing any more.
    aliases = [f"first={models[0]}", f"second={models[1]}"]
    assert served_names(models, aliases) == [("first",), ("second",)]


@pytest.mark.parametrize(
    ("aliases", "told"),
    [
        (["small"], "does not say of which model"),
        (["small=c"], "no model of this server is 'c'"),
        (["small=model"], "more than one model of this server is 'model'"),
        (["=a"], "gives no name"),
        (["\x1b=a"], "gives no name"),
        (["b=a", "x=one", "y=two"], "two models are called 'b'"),
        (["x=a", "x=b"], "two models are called 'x'"),
    ],
)
def test_an_alias_that_cannot_be_is_refused(
    files: dict[str, str], aliases: list[str], told: str
) -> None:
    asked = [each.replace("one", files["one"]).replace("two", files["two"]) for each in aliases]
    with pytest.raises(UsageError, match=told):
        served_names(list(files.values()), asked)


def test_a_model_that_does_not_exist_is_refused_at_once(files: dict[str, str]) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        served_names([files["a"], "missing.gguf"], [])

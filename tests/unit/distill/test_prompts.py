"""Where prompts come from, and which are held out."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from edge_spec.distill.prompts import GivenPrompts, domain_prompts
from edge_spec.errors import UsageError


class _Asked:
    """An engine that is asked nothing: what it would be asked is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held_out: dict[str, bool] = {}
        self.parts = SimpleNamespace(text=SimpleNamespace(prompt_of=lambda text: text))
        monkeypatch.setattr("edge_spec.distill.prompts.answered", self._answered)

    def chat_sampling(self, **asked: float) -> None:
        """Draws nothing."""

    def _answered(self, engine: object, prompt: str, *options: object) -> None:
        self.held_out[prompt] = bool(options[2])


def _held_out(prompts: list[str], monkeypatch: pytest.MonkeyPatch, tasks: int) -> dict[str, bool]:
    engine, given = _Asked(monkeypatch), GivenPrompts(prompts, 8)
    for task in range(tasks):
        given.conversation(engine, task, Event())  # type: ignore[arg-type]
    return engine.held_out


def test_one_prompt_in_ten_is_held_out_whatever_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [f"prompt {index}" for index in range(30)]
    found = _held_out(prompts, monkeypatch, 30)
    assert len(found) == 30 and sum(found.values()) == 3
    assert _held_out(prompts[::-1], monkeypatch, 30) == found
    assert sorted(_held_out(prompts, monkeypatch, 2).values()) == [False, True]
    assert list(_held_out(["a", "b"], monkeypatch, 4).values()) == [False, True]


def test_one_prompt_is_too_little() -> None:
    with pytest.raises(UsageError, match="too little to learn from"):
        GivenPrompts(["the same", "the same"], 8)


def test_other_prompts_are_another_run() -> None:
    one, other = GivenPrompts(["a", "b"], 8), GivenPrompts(["a", "c"], 8)
    assert len({one.identity, other.identity, GivenPrompts(["a", "b"], 9).identity}) == 3


def test_each_passage_of_a_domain_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("First.\n\n" + "x" * 1190 + "\n\nLast.")
    (tmp_path / "two.md").write_text("Another text.")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    (tmp_path / ".hidden").write_text("A secret.")
    found = domain_prompts(tmp_path)
    assert any("First." in each for each in found) and any("Last." in each for each in found)
    assert any("Another text." in each for each in found)
    assert not any("secret" in each for each in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("content", [b"", b" \n\n ", b"\xff\xfe\x00", b"text\0text"])
def test_a_domain_without_text_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "domain.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="there is no UTF-8 text"):
        domain_prompts(path)


def test_a_domain_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or directory"):
        domain_prompts(tmp_path / "none")

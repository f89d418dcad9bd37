"""What an error says: one line that is fit to be shown, whatever file it quotes."""

from __future__ import annotations

import pytest

from edge_spec.errors import EdgeSpecError, ModelFileError


def shown(message: str) -> str:
    return str(ModelFileError(message, remedy="Download it again."))


def test_it_is_one_line_with_its_remedy() -> None:
    assert shown("a.gguf is\ndamaged") == "a.gguf is damaged. Download it again."
    assert shown("模型 “ü” 🙂") == "模型 “ü” 🙂. Download it again."


def test_a_name_as_long_as_a_file_leaves_room_for_the_rest() -> None:
    line = shown("tensor " + "x" * 100_000 + " has no shape")
    assert line.startswith("tensor xxx") and " … xxx" in line
    assert line.endswith("x has no shape. Download it again.")
    assert len(line) < 2000


@pytest.mark.parametrize("sent", ["\x1b[2J", "\x9b31m", "\x07", "\u202e", "\udc80", "\x00"])
def test_what_a_terminal_could_obey_is_not_shown(sent: str) -> None:
    line = shown(f"two tensors named {sent}a")
    assert line.isprintable() and "\ufffd" in line


def test_the_message_alone_is_as_fit_to_be_shown() -> None:
    error = EdgeSpecError("a\x1b\n" + "x" * 100_000 + " at the end", remedy="None.")
    assert error.shown.startswith("a\ufffd xxx") and error.shown.endswith("x at the end")
    assert len(error.shown) < 2000
    assert str(error) == f"{error.shown}. None."


def test_the_message_itself_is_kept_for_programs() -> None:
    error = EdgeSpecError("a\x1b", remedy="None.")
    assert (error.message, error.remedy) == ("a\x1b", "None.")

"""Outside of a terminal long work is told of in a few lines, with what is left of it."""

from __future__ import annotations

import sys

import pytest

from edge_spec.cli.output import ProgressBar


def test_what_is_left_is_told_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """A step every four seconds, ten in all: lines at once, after 16 and after 32 seconds."""
    now = 100.0
    with ProgressBar(lambda: now) as bar:
        for step in range(11):
            bar("Converting the weights", step / 10)
            now += 4
        bar("Comparing with the reference", 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "Converting the weights ...",
        "Converting the weights: 40%, about 24 s left",
        "Converting the weights: 80%, about 8 s left",
        "Comparing with the reference ...",
    ]


def test_what_changes_within_brackets_is_the_same_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar in a terminal, and one beginning elsewhere, however often acceptance is measured."""
    with ProgressBar() as bar:
        for step in range(5):
            bar(f"Training ({step} % accepted)", step / 5)
    assert capsys.readouterr().err.splitlines() == ["Training (0 % accepted) ..."]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with ProgressBar() as bar:
        for step in range(5):
            bar(f"Training ({step} % accepted)", step / 5)
    drawn = capsys.readouterr().err.split("Training")
    assert drawn[-1].startswith(" (4 % accepted)") and "\n" not in "".join(drawn[:-1])  # one row

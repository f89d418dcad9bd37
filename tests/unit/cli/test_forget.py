"""`edge-spec learn forget`."""

from pathlib import Path

import pytest

from edge_spec.cli import training
from edge_spec.cli.main import run
from edge_spec.distill.idle_learning import LearntFolder
from edge_spec.drafters.lookup import answers


def test_a_model_with_a_head_and_answers_counts_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_kept", lambda model: ([Path("hf-1a")], [Path("hf-1a.json")]))
    monkeypatch.setattr(LearntFolder, "forget", lambda folder: 1_000_000)
    monkeypatch.setattr(answers, "forget", lambda path: 500_000)
    assert run(["learn", "forget"]) == 0
    assert capsys.readouterr().out == "Forgotten: 1 model, 1.5 MB.\n"

"""Placements of a plan are tried by the engines that they would be used with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from edge_spec.core.isolated import IsolatedError
from edge_spec.loader.plan_trial import EngineTrial
from edge_spec.models.devices import processor
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates
from edge_spec.placement.plan import Place, Placement
from edge_spec.placement.planner import Tried
from fixtures.silence import quiet

PROMPTS = [[1, 5, 6, 7], [1, 8, 9]]


@pytest.fixture
def model(gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return str(gguf("llama"))


def place_of(model: str) -> Place:
    (found,), _ = candidates(Source(model, quiet), LoadOptions(), [processor("ort")], quiet)
    return found.place


def test_each_placement_writes_in_turns_and_is_told_by_its_rate(model: str) -> None:
    here = place_of(model)
    steps: list[float] = []
    ways = [
        Placement(here, None, "none"),
        Placement(here, None, "suffix"),
        Placement(here, here, "draft-model"),
    ]
    found = EngineTrial(model, model)(ways, PROMPTS, 5, steps.append)
    assert [*found] == ["none", "suffix", "draft-model"]
    tried = [each for each in found.values() if isinstance(each, Tried)]
    assert len(tried) == 3 and all(each.tokens_per_s > 0 for each in tried)
    assert tried[0].speedup == 1.0 and tried[0].acceptance is None
    assert steps == pytest.approx([0.0, *(i / 6 for i in range(6))])  # of each prompt, each drafter


def test_a_draft_with_other_tokens_is_tried_as_it_would_draft(
    model: str, hf: Callable[..., Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    copytree(hf("llama"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    here = place_of(model)
    ways = [Placement(here, None, "none"), Placement(here, here, "draft-model")]
    found = EngineTrial(model, str(other))(ways, PROMPTS, 5, lambda fraction: None)
    assert isinstance(found["draft-model"], Tried)


def test_a_drafter_that_the_model_cannot_have_is_told_and_the_others_are_tried(
    model: str,
) -> None:
    here = place_of(model)
    ways = [Placement(here, None, name) for name in ("none", "nonesuch", "suffix")]
    found = EngineTrial(model, None)(ways, PROMPTS, 5, lambda fraction: None)
    assert "nonesuch" in str(found["nonesuch"]) and isinstance(found["suffix"], Tried)


def test_a_placement_that_cannot_be_opened_is_a_reason_in_one_line(model: str) -> None:
    missing = Placement(Place("nonesuch", "cpu", None, "F32", "1"), None, "none")
    with pytest.raises(IsolatedError, match="nonesuch") as refused:
        EngineTrial(model, None)([missing], PROMPTS, 5, lambda fraction: None)
    assert "\n" not in str(refused.value)

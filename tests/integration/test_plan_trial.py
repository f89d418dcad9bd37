"""Placements of a plan are tried by the engines that they would be used with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_spec.loader.plan_trial import EngineTrial
from edge_spec.models.devices import processor
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates
from edge_spec.placement.place_work import PlaceError
from edge_spec.scheduler.plan_file import Place, Placement
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
        Placement(here, here, "draft-model"),
        Placement(here, None, "suffix"),
        Placement(here, None, "none"),
    ]
    rates = EngineTrial(model, model)(ways, PROMPTS, 5, steps.append)
    assert len(rates) == 3 and all(rate > 0 for rate in rates)
    assert steps == pytest.approx(
        [0.0, *(i / 6 for i in range(6))]
    )  # of each prompt, each placement


def test_a_placement_that_cannot_be_opened_is_a_reason_in_one_line(model: str) -> None:
    missing = Placement(Place("ort", "cpu", None, "F32", "1"), None, "nonesuch")
    with pytest.raises(PlaceError, match="nonesuch") as refused:
        EngineTrial(model, None)([missing], PROMPTS, 5, lambda fraction: None)
    assert "\n" not in str(refused.value)

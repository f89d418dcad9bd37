"""What a place that fails is said to have failed by, and what is not tried again."""

from __future__ import annotations

from typing import Any

import pytest

from edge_spec.core.isolated import IsolatedError
from edge_spec.core.model import RuntimeOptions
from edge_spec.models.devices import Device
from edge_spec.models.source import Source
from edge_spec.placement import place_work
from edge_spec.placement.candidates import Candidate
from edge_spec.placement.place_work import Faults, PlaceError, attempt, measure_place
from edge_spec.scheduler.profile import ProfileKey
from fixtures.silence import quiet


def candidate(device: str, kind: str | None, model: str = "target") -> Candidate:
    key = ProfileKey(model, "0", "Q4_0", "rig", "1", device, None, (), "a processor")
    options = RuntimeOptions(providers=(device,))
    prepared: Any = None
    return Candidate(Source(model, quiet), Device("rig", device, kind, ""), prepared, options, key)


def fails(place: Candidate, work: Any = measure_place) -> PlaceError:
    with pytest.raises(PlaceError) as caught:
        attempt(work, place, 1.0, lambda fraction: None)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("kind", ["gpu", "npu", "remote", None])
def test_all_but_the_processor_is_tried_in_another_process(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def isolated(*given: object, **more: object) -> None:
        raise IsolatedError("elsewhere")

    monkeypatch.setattr(place_work, "isolated", isolated)
    assert str(fails(candidate("x", kind))) == "elsewhere"


def test_a_silent_device_is_not_waited_for_again_and_another_fault_is_one_models() -> None:
    faults = Faults()
    faults.add(candidate("hangs", "gpu"), PlaceError("no answer", is_silent=True))
    faults.add(candidate("full", "gpu"), PlaceError("no memory"))
    assert faults.of(candidate("hangs", "gpu", "draft")) == "no answer"
    assert faults.of(candidate("full", "gpu")) == "no memory"
    assert faults.of(candidate("full", "gpu", "draft")) is None

"""How places are ranked, and what a plan says of each that is not the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.models.devices import Device
from edge_spec.models.memory import MAIN
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import Place, candidates
from edge_spec.placement.plan import Placement, pair_step_s, rank_places
from edge_spec.scheduler.profile import Profile
from fixtures.silence import quiet

MB = 1_000_000
ROOM = 500 * MB
FREE = {MAIN: ROOM}


def placement(runtime: str = "ort", step_s: float | None = 0.01, **more: Any) -> Placement:
    place = Place(runtime, "cpu", None, "int4 block 32")
    return replace(Placement(place, step_s=step_s, memory_bytes=100 * MB), **more)


BEST, NEXT = placement("llamacpp", 0.005), placement()


def too_large(each: Placement) -> Placement:
    return replace(each, memory_bytes=ROOM + 1)


def test_the_place_with_the_fastest_plain_step_that_fits_is_the_first() -> None:
    fast = too_large(placement("openvino", 0.001))
    assert rank_places([NEXT, fast, BEST], FREE)[0] == BEST
    assert rank_places([NEXT, fast, BEST], {})[0].target == fast.target


@pytest.mark.parametrize(
    ("loser", "reason"),
    [
        (too_large(BEST), "does not fit: 500 MB of 500 MB free"),
        (placement(step_s=None), "does not fit: 100 MB are too much"),
        (NEXT, "50% slower: a step takes 10 ms, not 5"),
        (placement(step_s=2.5), "100% slower: a step takes 2,500 ms, not 5"),
    ],
)
def test_a_place_is_told_why_it_is_not_the_first(loser: Placement, reason: str) -> None:
    best, other = rank_places([loser, BEST], FREE)
    assert best == BEST and other.reason == reason


def test_weights_that_lose_more_than_half_a_percent_come_after_those_that_do_not() -> None:
    lossy = replace(BEST, loss=0.2)
    close, exact = replace(NEXT, loss=0.005), placement(step_s=0.011, loss=0.0)
    unknown = placement("openvino", 0.007)
    first, *others = rank_places([lossy, close, exact, unknown], FREE)
    assert first.target == unknown.target
    assert [each.step_s for each in others] == [0.01, 0.011, 0.005]
    assert others[-1].reason == "its weights lose 22.1% of perplexity"
    too_large_exact = too_large(replace(NEXT, loss=0.0))
    assert rank_places([lossy, too_large_exact], FREE)[0].target == lossy.target  # the only one


def test_devices_with_a_fault_are_told_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    source = Source(str(tmp_path / "m.gguf"), quiet)
    devices = [
        Device("ort", "cuda", "gpu", "a card", fault="no driver"),
        Device("openvino", None, None, "", fault="not installed"),
        Device("reference", "cpu", "cpu", "the processor"),
    ]
    with pytest.raises(UsageError, match=r"m\.gguf: ort cuda: no driver; openvino: not installed"):
        candidates(source, LoadOptions(), devices, quiet)


def test_a_pair_can_pay_whose_step_is_shorter_than_as_many_plain_ones() -> None:
    target, draft = Profile({1: 0.1, 5: 0.2}, 6, 0.0), Profile({1: 0.05}, 6, 0.0)
    assert pair_step_s(target, draft) == pytest.approx(0.2 + 4 * 0.05)
    assert pair_step_s(target, None) is pair_step_s(None, draft) is None
    pair = placement(step_s=0.1, draft=NEXT.target)
    slow, fast, unknown = (replace(pair, pair_step_s=each) for each in (0.51, 0.49, None))
    assert [each.can_pay for each in (slow, fast, unknown)] == [False, True, False]
    first, *others = rank_places([unknown, slow, fast], FREE)
    assert first == fast and [each.reason.partition(":")[0] for each in others] == [
        *("it cannot pay", "does not fit")
    ]

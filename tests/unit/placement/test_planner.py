"""What a plan is made of: places, forecasts on recorded texts, the ranking and its reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_spec.errors import UsageError
from edge_spec.models import runtimes
from edge_spec.models.devices import Device
from edge_spec.models.memory import FreeMemory
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidates
from edge_spec.placement.trial import ranked
from edge_spec.scheduler.plan_file import (
    Place,
    Placement,
)
from fixtures.silence import quiet

MB = 1_000_000
ROOM = 500 * MB
FREE = FreeMemory(ROOM)


def place(runtime: str = "ort", device: str = "cpu", threads: int | None = None) -> Place:
    return Place(runtime, device, threads, "int4 block 32", runtimes.library_version(runtime))


def placement(
    target: Place, drafter: str = "suffix", rate: float = 100.0, **more: Any
) -> Placement:
    found = Placement(target, None, drafter, rate, speedup=1.25, acceptance=0.5, row_share=0.2)
    return replace(found, memory_bytes=100 * MB, **more)


BEST = placement(place("llamacpp"), rate=200.0, step_s=6.25e-3)
NEXT = placement(place("ort"), "none")


def too_large(each: Placement) -> Placement:
    return replace(each, memory_bytes=ROOM + 1)


def test_the_fastest_that_fits_is_the_first() -> None:
    fast = too_large(placement(place("openvino"), rate=900.0))
    assert ranked([NEXT, fast, BEST], FREE)[0] == BEST
    assert ranked([NEXT, fast, BEST], FreeMemory(None))[0].target == fast.target


def test_the_speedup_is_over_the_fastest_plain_step_of_all_places_that_can_be_had() -> None:
    """Padded steps, and those of a slower place, are no baseline to be proud of."""
    plain = placement(place("llamacpp"), "none", 150.0, step_s=1 / 160, loss=0.0)  # padded
    slow = placement(place("ort"), rate=120.0, step_s=1 / 80)
    lossy = placement(place("openvino"), rate=900.0, step_s=1 / 800, loss=0.2)
    found = {each.target.runtime: each.speedup for each in ranked([plain, slow, lossy], FREE)}
    assert found == {
        "llamacpp": pytest.approx(150 / 160),
        "ort": pytest.approx(120 / 160),
        "openvino": pytest.approx(900 / 160),
    }


@pytest.mark.parametrize(
    ("loser", "reason"),
    [
        (too_large(BEST), "does not fit: 500 MB of 500 MB free"),
        (replace(BEST, tokens_per_s=None), "does not fit: 100 MB are too much"),
        (
            placement(place("ort"), rate=100.0, step_s=12.5e-3),
            "50% slower: a step takes 12.5 ms, not 6.25",
        ),
        (
            placement(place("llamacpp"), "none", 160.0, speedup=1.0),
            "20% slower: nothing is drafted",
        ),
        (
            placement(place("llamacpp"), "jacobi", 150.0, speedup=0.9375, acceptance=0.1),
            "25% slower: its draft tokens are right too seldom here (10%)",
        ),
        (
            placement(place("llamacpp"), "jacobi", 160.0, speedup=1.0, acceptance=None),
            "20% slower: it found nothing to draft here",
        ),
        (
            placement(place("llamacpp"), "lookahead", 180.0, speedup=1.125, row_share=0.25),
            "10% slower: a row costs 0.25 of a step",
        ),
        (
            placement(place("llamacpp"), "draft-model", 180.0, speedup=1.125, guess_share=0.5),
            "10% slower: a draft token takes 0.50 of a step",
        ),
    ],
)
def test_a_loser_is_told_why(loser: Placement, reason: str) -> None:
    best, other = ranked([loser, BEST], FREE)
    assert best == BEST and other.reason == reason


def test_weights_that_lose_more_than_half_a_percent_come_after_those_that_do_not() -> None:
    lossy = replace(BEST, loss=0.2)
    close, exact = replace(NEXT, loss=0.005, tokens_per_s=90.0), replace(NEXT, loss=0.0)
    unknown = replace(BEST, target=place("openvino"), tokens_per_s=150.0)
    first, *others = ranked([lossy, close, exact, unknown], FREE)
    assert first.target == unknown.target
    assert [each.tokens_per_s for each in others] == [100.0, 90.0, 200.0]
    assert others[-1].reason == "its weights lose 22.1% of perplexity"
    too_large_exact = too_large(replace(NEXT, loss=0.0))
    assert ranked([lossy, too_large_exact], FREE)[0].target == lossy.target  # there is no other


def test_a_drafter_that_keeps_answers_is_never_chosen_unasked() -> None:
    keeping = replace(BEST, drafter="answers", tokens_per_s=900.0)
    first, *others = ranked([keeping, NEXT, BEST], FREE)
    assert first == BEST and others[-1].drafter == "answers"
    assert others[-1].reason == "it keeps answers on the disk, and is used where it is asked for"


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

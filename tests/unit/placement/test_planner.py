"""What a plan is made of: places, forecasts on recorded texts, the ranking and its reasons."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_spec.cli.plan import _shown
from edge_spec.control.policy import FixedPolicy
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.errors import UsageError
from edge_spec.fitting.devices import Device
from edge_spec.fitting.forecast import FreeMemory
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement import candidates as candidates_module
from edge_spec.placement.candidates import candidates, thread_counts
from edge_spec.placement.chain import Meanwhile, RoundCosts, agreements, best_walk, walk
from edge_spec.placement.gains import RealTime, pass_costs
from edge_spec.placement.plan import (
    Place,
    Placement,
)
from edge_spec.placement.profile import ContextCosts, Profile
from edge_spec.placement.ranking import ranked, why_no_draft
from edge_spec.placement.replay import Recording, VirtualClock, replay
from edge_spec.testing import ScriptedModel
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


def test_it_is_said_why_a_draft_does_not_pay() -> None:
    paired = replace(BEST, draft=place(), drafter="draft-model", tokens_per_s=55.0, guess_share=0.4)
    assert why_no_draft(ranked([paired, NEXT, BEST], FREE)) == (
        "the draft does not pay here: 55.0 tokens/s with it, 200.0 without. "
        "A draft token takes 0.40 of a step, and 50% of them are right"
    )
    assert why_no_draft(ranked([replace(paired, tokens_per_s=900.0), BEST], FREE)) is None
    assert why_no_draft(ranked([NEXT, BEST], FREE)) is None


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


class OpenedAnywhere:
    """A runtime that reads what it is given."""

    def __init__(self, name: str, reads: str) -> None:
        self.name, self.reads = name, reads


def test_a_large_file_is_converted_only_where_nothing_reads_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default runtime of a machine may be one that has to convert it."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    prepared: list[str] = []

    def prepare(resolution: Any, progress: Any) -> Any:
        prepared.append(resolution.runtime.name)
        weights = SimpleNamespace(weight_types={"Q4_0"})
        return SimpleNamespace(runtime=resolution.runtime, source=weights, scored_tokens=None)

    def resolution(source: Source, name: str, *more: Any) -> Any:
        reads = name == "llamacpp"
        options = SimpleNamespace(compute=None)
        stored = SimpleNamespace(is_there=reads, format=name, options=options)
        return SimpleNamespace(runtime=OpenedAnywhere(name, "gguf"), stored=stored)

    monkeypatch.setattr(candidates_module, "resolution_on", resolution)
    monkeypatch.setattr(candidates_module, "prepare_model", prepare)
    monkeypatch.setattr(candidates_module, "available_cores", lambda: 1)
    source = Source(str(file), quiet)
    both = [Device(name, "cpu", "cpu", "the processor") for name in ("ort", "llamacpp")]
    found, _ = candidates(source, LoadOptions(), both, quiet)
    assert prepared == ["llamacpp", "ort"] and len(found) == 2  # it is small: both are looked at
    prepared.clear()
    monkeypatch.setattr(candidates_module, "_CHEAP_BYTES", 3)
    found, refused = candidates(source, LoadOptions(), both, quiet)
    assert prepared == ["llamacpp"] and [each.place.runtime for each in found] == ["llamacpp"]
    assert len(refused) == 1 and refused[0].startswith("ort: m would have to be converted")
    prepared.clear()
    candidates(source, LoadOptions(), both[:1], quiet)
    assert prepared == ["ort"]


def test_the_table_shows_all_drafters_of_the_best_place_and_one_of_each_other() -> None:
    same = replace(BEST, drafter="none")
    slower = replace(NEXT, drafter="suffix", tokens_per_s=90.0)
    assert _shown([BEST, same, NEXT, slower]) == [BEST, same, NEXT]


@pytest.mark.parametrize(
    ("cores", "kind", "is_draft", "expected"),
    [
        (8, "cpu", False, [None, 4]),
        (2, "cpu", False, [None]),
        (2, "cpu", True, [None, 1]),
        (1, "cpu", True, [None]),
        (8, "gpu", True, [None]),
    ],
)
def test_half_of_the_cores_is_tried_where_it_makes_sense(
    cores: int,
    kind: str,
    is_draft: bool,
    expected: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates_module, "available_cores", lambda: cores)
    assert thread_counts(Device("ort", "x", kind, ""), is_draft) == expected


def test_a_runtime_s_library_has_a_version_and_a_missing_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert runtimes.library_version("reference") == version("edge-spec")  # which brings it
    monkeypatch.setitem(runtimes.LIBRARIES, "ort", ("edge-spec",))
    assert runtimes.library_version("ort") == version("edge-spec")
    monkeypatch.setitem(runtimes.LIBRARIES, "ort", ("edge-spec-nonesuch",))
    assert runtimes.library_version("ort") == ""
    assert runtimes.library_version("nonesuch") == ""


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


def test_a_drafter_is_charged_the_time_that_it_really_takes() -> None:
    ticks = iter(range(10_000))
    tokens = (3, 4, 5, 6)
    top = np.array(tokens, np.int32)[:, None]
    recording = Recording("", (1, 2), tokens, top, np.zeros((4, 1), np.float32))

    def speculate(clock: VirtualClock) -> Any:
        return [RealTime(SuffixDrafter(), clock, lambda: float(next(ticks)))], FixedPolicy()

    (stats,) = replay([recording], 8, speculate, lambda rows, context: 10.0)
    assert stats.rounds == 4
    assert stats.verify_ms == pytest.approx(4 * 10e3)
    # A tick to propose and one to observe; for the last token nothing is proposed.
    assert stats.draft_ms == pytest.approx(7 * 1e3)


class Echo(ScriptedModel):
    """Always prefers the token that it was given last."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: np.eye(8, dtype=np.float32)[tokens[-1]], 8)


def recorded(*tokens: int) -> Recording:
    top = np.array(tokens, np.int32)[:, None]
    return Recording("", (1, 2), tokens, top, np.zeros((len(tokens), 1), np.float32))


def test_a_draft_agrees_where_it_prefers_the_text_s_token() -> None:
    texts = [recorded(2, 2, 3, 3), recorded(*[2] * 70)]  # the second in several passes
    assert agreements(Echo(), texts) == [[True, True, False, True], [True] * 70]


def test_a_walk_accepts_up_to_the_first_miss_and_pays_for_all_draft_tokens() -> None:
    text, hits = recorded(0, 0, 0, 0, 0, 0), [True, False, True, True, True, True]
    found = walk([text], [hits], 2, RoundCosts(lambda rows, context: float(rows), draft_s=0.1))
    # 1 of 2, with the recovered token: 2 tokens; then 2 of 2 with the bonus; then the last alone.
    assert (found.num_tokens, found.num_verified, found.num_accepted) == (6, 4, 3)
    assert found.seconds == pytest.approx(3 + 3 + 1 + 4 * 0.1)


def test_the_best_walk_draft_tokens_more_where_rows_are_cheap_and_the_draft_is_good() -> None:
    text = recorded(*[0] * 60)
    good, bad = [[True] * 60], [[True, False] * 30]

    def cheap(rows: int, context: int) -> float:
        return 1.0 + 0.01 * rows

    assert best_walk([text], good, RoundCosts(cheap, draft_s=0.01)).num_guesses == 8
    assert best_walk([text], bad, RoundCosts(cheap, draft_s=0.3)).num_guesses == 1


def test_no_draft_tokens_are_plain_decoding() -> None:
    costs = RoundCosts(lambda rows, context: context * rows, 9.0, 9.0, 9.0)
    found = walk([recorded(0, 0, 0)], [[False] * 3], 0, costs)
    assert (found.num_tokens, found.seconds, found.acceptance) == (3, 2 + 3 + 4, 0.0)


def test_a_round_pays_for_taking_turns_and_for_reading_what_was_right() -> None:
    text, hits = recorded(0, 0, 0, 0, 0, 0), [True, True, True, False, True, True]
    costs = RoundCosts(lambda rows, context: 1.0, draft_s=0.1, catch_up_s=0.03, switch_s=0.2)
    # 2 of 2 and the bonus; after it 0 of 2, the draft having to catch up; then 1 of 1.
    found = walk([text], [hits], 2, costs)
    assert found.seconds == pytest.approx(3 * 1.0 + 5 * 0.1 + 3 * 0.2 + 0.03)


def test_what_the_draft_has_read_meanwhile_is_not_paid_for_again() -> None:
    text, hits = recorded(*[0] * 9), [True, True, True, True, True, False, True, True, True]
    costs = RoundCosts(lambda rows, context: 1.0, 0.2, meanwhile=Meanwhile(1.1, 1.25))
    # Rounds of 2 draft tokens: a pass takes 1.1 and half of one of the draft's of 0.25, in which
    # this makes four, the token that the target adds and 2 draft tokens among them. Those serve the
    # second round, since the token that was added is the foreseen one, but not the third.
    found = walk([text], [hits], 2, costs)
    assert found.seconds == pytest.approx(3 * (1.1 + 0.2 * 1.25 / 2) + 2 * 0.2 + 0.0 + 2 * 0.2)


def test_what_a_round_takes_is_its_pass_its_logits_and_its_commit() -> None:
    profile = Profile(
        (ContextCosts(0, {1: 1.0, 2: 1.5}), ContextCosts(320, {1: 2.0, 2: 3.0})),
        prefill_tokens_per_s=1.0,
        commit_s=0.25,
        logits_row_s=0.125,
        rounds=1,
        spread=0.0,
    )
    pass_s = pass_costs(profile)
    assert pass_s(2, 160) == pytest.approx(2.25 + 0.25 + 0.25)
    assert pass_s(1, 0) < pass_s(1, 320)

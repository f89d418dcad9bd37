"""The n-gram cache drafts what was written before, and is as sure of it as outcomes allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import Verdict
from edge_spec.drafters.lookup import ngram_cache
from edge_spec.drafters.lookup.ngram_cache import SAVE_AFTER_S, NgramCacheDrafter
from edge_spec.drafters.lookup.ngram_store import NgramStore
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.errors import UsageError

VOCAB = 260
OUT = Forward(np.zeros((1, 1), np.float32))
CHAINS = Budget(num_draft_tokens=4, num_rows=64, branches=False)
TREES = Budget(num_draft_tokens=4, num_rows=64)
ORDERS, KINDS = 3, 8  # kinds an order


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ngrams" / "model.ngrams"


def open_drafter(path: Path, clock: Clock | None = None) -> NgramCacheDrafter:
    drafter = NgramCacheDrafter(path, "test-vocabulary", VOCAB, clock or Clock())
    checked: Drafter = drafter
    assert checked.name == "ngram-cache"
    return drafter


def saved(path: Path, context: tuple[int, ...]) -> list[tuple[int, int]]:
    return NgramStore(path, "test-vocabulary", VOCAB).lookup(context, 10**6).best


def write(drafter: NgramCacheDrafter, prompt: Sequence[int], *rounds: Sequence[int]) -> None:
    """A generation of plain rounds."""
    drafter.begin(prompt)
    pending = prompt[-1]
    for tokens in rounds:
        tree = drafter.propose(pending, CHAINS)
        drafter.observe(tree.first_rows(1), OUT, Verdict(tuple(tokens), (), True))
        pending = tokens[-1]


def kinds_seen(drafter: NgramCacheDrafter) -> dict[tuple[int, int], tuple[int, int]]:
    """Outcomes and right ones of each kind, (order, evidence), that was learnt about."""
    seen, right = drafter.state_dict()["acceptance"][:2]
    fresh_seen, fresh_right = open_drafter(Path("unused")).state_dict()["acceptance"][:2]
    return {
        (1 + kind // KINDS, kind % KINDS): (
            round(seen[kind] - fresh_seen[kind]),
            round(right[kind] - fresh_right[kind]),
        )
        for kind in np.flatnonzero(seen != fresh_seen).tolist()
    }


def test_what_is_written_is_counted_with_the_contexts_before_it(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4], [5, 6], [7])
    drafter.close()
    text = [1, 2, 3, 4, 5, 6, 7]
    expected: dict[tuple[int, ...], list[tuple[int, int]]] = {
        tuple(text[i - order : i]): [(text[i], 1)] for i in range(3, 7) for order in (1, 2, 3)
    }
    records = NgramStore(path, "test-vocabulary", VOCAB)._saved.records
    assert len(records.tokens) == len(expected) == 12
    for context, followers in expected.items():
        assert saved(path, context) == followers


def test_a_prompt_is_not_counted(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3, 4, 5, 9], [7])
    drafter.close()
    for context in ((1,), (2,), (1, 2), (1, 2, 3), (3, 4, 5)):
        assert saved(path, context) == []
    assert saved(path, (9,)) == saved(path, (4, 5, 9)) == [(7, 1)]


def test_contexts_do_not_reach_over_the_beginning_of_a_generation(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4])
    write(drafter, [8], [9], [5])
    drafter.close()
    assert saved(path, (4,)) == [] and saved(path, (4, 8)) == [] and saved(path, (3, 4, 8)) == []
    assert saved(path, (8,)) == [(9, 1)] and saved(path, (8, 9)) == [(5, 1)]


def test_another_session_is_drafted_from(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4, 5], [6, 7, 8])
    assert drafter.propose(8, CHAINS).tokens.tolist() == [8]  # never followed by anything
    drafter.close()
    later = open_drafter(path)
    later.begin([50, 1, 2, 3])
    tree = later.propose(3, CHAINS)
    assert tree.tokens.tolist() == [3, 4, 5, 6, 7]
    assert tree.proposed_by == ("", *["ngram-cache"] * 4)
    assert later.propose(3, Budget(2, 64)).tokens.tolist() == [3, 4, 5]
    assert later.propose(3, Budget(4, 3)).tokens.tolist() == [3, 4, 5]
    assert later.propose(3, Budget(0, 1)).tokens.tolist() == [3]


def test_the_same_session_is_drafted_from_before_it_is_saved(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4, 5, 6])
    drafter.begin([1, 2, 3])
    assert drafter.propose(3, CHAINS).tokens.tolist() == [3, 4, 5, 6]
    assert not path.exists()


def test_the_longest_known_context_is_followed(path: Path) -> None:
    drafter = open_drafter(path)
    for _ in range(5):
        write(drafter, [9], [3, 100])
        write(drafter, [8], [2, 3, 101], [9])
    write(drafter, [1], [2, 3, 102])
    for prompt, candidate in (([1, 2, 3], 102), ([7, 2, 3], 101), ([7, 9, 3], 100)):
        drafter.begin(prompt)
        assert drafter.propose(3, Budget(1, 64, branches=False)).tokens.tolist() == [3, candidate]
    drafter.begin([6, 6, 3])  # both longer contexts are new
    tokens = drafter.propose(3, Budget(1, 64)).tokens.tolist()
    assert sorted(tokens[1:]) == [100, 101, 102]


def test_branches_are_the_most_frequent_followers(path: Path) -> None:
    drafter = open_drafter(path)
    for token, times in ((10, 1), (11, 5), (12, 3), (13, 4), (14, 2)):
        for _ in range(times):
            write(drafter, [1, 2, 3], [token])
    drafter.begin([1, 2, 3])
    tree = drafter.propose(3, Budget(1, 64))
    assert sorted(tree.tokens[1:].tolist()) == [11, 12, 13, 14]
    assert tree.children(0) == [1, 2, 3, 4]
    assert tree.confidence[1:].sum() <= 1 + 1e-6
    assert drafter.propose(3, CHAINS).tokens.tolist() == [3, 11]


def test_confidence_rises_with_context_count_and_share(path: Path) -> None:
    priors = np.array(ngram_cache._PRIORS).reshape(ORDERS, KINDS)
    assert (priors > 0).all() and (priors < 1).all()
    assert (np.diff(priors, axis=0) >= 0).all() and (np.diff(priors, axis=1) >= 0).all()
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4])
    drafter.begin([1, 2, 3])
    once = drafter.propose(3, CHAINS).confidence[1]
    write(drafter, [1, 2, 3], [4])
    drafter.begin([1, 2, 3])
    twice = drafter.propose(3, CHAINS).confidence[1]
    drafter.begin([9, 2, 3])
    shorter = drafter.propose(3, CHAINS).confidence[1]
    write(drafter, [1, 2, 3], [5])
    drafter.begin([1, 2, 3])
    contested = drafter.propose(3, CHAINS).confidence[1]
    assert 0 < contested < once < twice < 1 and shorter < twice


@pytest.mark.parametrize(
    ("count", "total", "evidence"),
    [
        *((1, 11, 0), (1, 10, 1), (24, 100, 1), (1, 4, 2), (49, 100, 2), (1, 2, 3), (79, 100, 3)),
        *((1, 1, 4), (2, 2, 5), (3, 3, 5), (4, 5, 6), (9, 9, 6), (10, 10, 7), (80, 100, 7)),
    ],
)
def test_each_kind_of_draft_token_is_learnt_about_by_itself(
    path: Path, count: int, total: int, evidence: int
) -> None:
    for context in ((3,), (2, 3), (1, 2, 3)):
        store = NgramStore(path, "test-vocabulary", VOCAB)
        store.add(context, 4, count)
        for token in range(5, 5 + total - count):  # the others are as rare as can be
            store.add(context, token)
        store.save()
    for prompt, order in (([1, 2, 3], 3), ([9, 2, 3], 2), ([9, 9, 3], 1)):
        for written, right in ((4, 1), (200, 0)):
            drafter = open_drafter(path)
            write(drafter, prompt, [written])
            assert kinds_seen(drafter) == {(order, evidence): (1, right)}


def test_a_round_teaches_about_every_draft_token_that_the_text_decides(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4, 5, 6])
    write(drafter, [1, 2, 3], [4, 5, 7])
    drafter.begin([1, 2, 3])
    tree = drafter.propose(3, TREES)
    assert sorted(tree.tokens.tolist()) == [3, 4, 5, 6, 7]
    before = drafter.state_dict()["acceptance"]
    drafter.observe(tree.first_rows(1), OUT, Verdict((4, 5, 7, 9), (), True))
    after = drafter.state_dict()["acceptance"]
    # 4 and 5 were seen twice each and right; 6 and 7 once each, and one of them was right.
    assert (after - before)[:2].sum(axis=1).tolist() == [4, 3]


def test_a_round_that_did_not_ask_teaches_nothing(path: Path, make_tree: Any) -> None:
    drafter = open_drafter(path)
    write(drafter, [1, 2, 3], [4, 5, 6])
    drafter.begin([1, 2, 3])
    drafter.propose(3, CHAINS)
    drafter.begin([1, 2, 3])  # the draft tokens of a generation that was cut off
    before = drafter.state_dict()["acceptance"]
    drafter.observe(make_tree(3, [4], [0]), OUT, Verdict((4, 5), (1,), True))
    assert (drafter.state_dict()["acceptance"] == before).all()
    drafter.propose(5, CHAINS)
    drafter.observe(make_tree(5, [6], [0]), OUT, Verdict((6,), (1,), True))
    learnt = drafter.state_dict()["acceptance"]
    assert (learnt != before).any()
    drafter.observe(make_tree(6, [6], [0]), OUT, Verdict((6,), (1,), True))
    assert (drafter.state_dict()["acceptance"] == learnt).all()


def test_confidence_is_calibrated(path: Path) -> None:
    # A text in which each token is followed by one of three, drawn 6 : 3 : 1 by the seed: every
    # context has the same followers, so shares estimate these chances. 4000 rounds; a bin of 300
    # draft tokens has a standard error of 0.03 at most, and counts lag after at first.
    rng = np.random.default_rng(7)
    successors = rng.permuted(np.tile(np.arange(40), (40, 1)), axis=1)[:, :3]
    drafter, pending = open_drafter(path), 0
    drafter.begin([pending])
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for number in range(4000):
        tree = drafter.propose(pending, Budget(1, 8))
        token = int(rng.choice(successors[pending], p=(0.6, 0.3, 0.1)))
        if number >= 1000:
            for row in tree.children(0):
                confidence = float(tree.confidence[row])
                bins[int(confidence * 5)].append((confidence, int(tree.tokens[row]) == token))
        drafter.observe(tree, OUT, Verdict((token,), (), True))
        pending = token
    checked = [outcomes for outcomes in bins.values() if len(outcomes) > 300]
    assert len(checked) >= 3
    for outcomes in checked:
        assert abs(np.mean([c for c, _ in outcomes]) - np.mean([r for _, r in outcomes])) < 0.08


def test_it_saves_when_an_answer_begins_a_minute_after_the_last_save(path: Path) -> None:
    clock = Clock()
    drafter = open_drafter(path, clock)
    write(drafter, [1], [2])
    clock.now = SAVE_AFTER_S
    drafter.begin([1])
    assert not path.exists()
    clock.now += 1
    write(drafter, [1], [2])
    assert saved(path, (1,)) == [(2, 1)]
    clock.now += SAVE_AFTER_S
    drafter.begin([1])  # a minute since the last save, not since the start
    assert saved(path, (1,)) == [(2, 1)]
    clock.now += 1
    drafter.begin([1])
    assert saved(path, (1,)) == [(2, 2)]


def test_rounds_touch_no_file_and_nothing_new_is_not_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, saves = Clock(), []
    monkeypatch.setattr(NgramStore, "save", lambda self: saves.append(self.num_unsaved))
    drafter = open_drafter(path, clock)
    clock.now = 10 * SAVE_AFTER_S
    drafter.begin([1])  # nothing is new
    for token in range(2, 6):
        clock.now += 10 * SAVE_AFTER_S
        drafter.observe(drafter.propose(token - 1, TREES), OUT, Verdict((token,), (), True))
    assert saves == []
    drafter.begin([1])
    assert saves == [1 + 2 + 3 + 3]  # records: contexts grow to three tokens


def test_a_save_that_fails_is_tried_again_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    clock = Clock()
    drafter = open_drafter(tmp_path / "file" / "ngrams", clock)
    tries: list[float] = []
    save = NgramStore.save

    def counted(self: NgramStore) -> bool:
        tries.append(clock.now)
        return save(self)

    monkeypatch.setattr(NgramStore, "save", counted)
    for second in range(0, 200, 20):
        clock.now = float(second)
        write(drafter, [1], [2])
    assert tries == [80, 160]
    drafter.begin([1])
    assert drafter.propose(1, CHAINS).tokens.tolist() == [1, 2]


def test_closing_twice_saves_once_and_more_can_follow(path: Path) -> None:
    drafter = open_drafter(path)
    write(drafter, [1], [2])
    drafter.close()
    content = path.read_bytes()
    drafter.close()
    assert path.read_bytes() == content
    write(drafter, [1], [2])
    drafter.close()
    assert saved(path, (1,)) == [(2, 2)]


def test_a_snapshot_restores_the_acceptance(path: Path) -> None:
    drafter = open_drafter(path)
    for _ in range(20):
        write(drafter, [1, 2, 3], [4])
    state = drafter.state_dict()
    drafter.close()
    later = open_drafter(path)
    later.load_state_dict(state)
    for each in (drafter, later):
        each.begin([1, 2, 3])
    tree, restored = (each.propose(3, CHAINS) for each in (drafter, later))
    assert (tree.confidence == restored.confidence).all()
    assert (later.state_dict()["acceptance"] == state["acceptance"]).all()
    others: list[dict[str, np.ndarray]] = [
        {},
        {"acceptance": np.ones((2, 5))},
        {"acceptance": np.ones(48)},
    ]
    for other in others:
        with pytest.raises((KeyError, ValueError), match="acceptance"):
            later.load_state_dict(other)
    assert (later.state_dict()["acceptance"] == state["acceptance"]).all()


def test_a_vocabulary_that_is_too_large_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="too large for the n-gram cache"):
        NgramCacheDrafter(path, "v", 2**21 - 1)


def test_the_text_is_the_same_and_a_second_session_has_more_draft_tokens_right(
    path: Path, decode: Any, greedy: Any, scripted: Any
) -> None:
    script = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
    model = scripted(3, script)
    right = []
    for _ in range(2):
        drafter = open_drafter(path)
        run = decode(model, [1, 2, 3], [drafter], max_tokens=60)
        assert run.tokens == greedy(model, [1, 2, 3], 60) == script
        right.append(sum(token.drafter == "ngram-cache" for token in run.decoded))
        drafter.close()
    assert right[0] < 10 and right[1] > 25

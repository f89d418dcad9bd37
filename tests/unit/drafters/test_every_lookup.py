"""What every drafter that needs no second model does alike, against plain descriptions of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.jacobi import (
    JacobiDrafter,
    LookaheadDrafter,
    SpareRowDrafter,
    WindowSize,
)
from edge_spec.drafters.lookup.answers import CorpusDrafter
from edge_spec.drafters.lookup.corpus_index import index_of
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import PredictionDrafter, SuffixDrafter
from edge_spec.drafters.protocol import Budget, Drafter, continues
from edge_spec.testing import ScriptedModel, random_logits
from edge_spec.text.vocabulary import Vocabulary
from fixtures import greedy_rounds

VOCAB = 6
SMALL = Vocabulary("a" * 64, VOCAB)
AMPLE = Budget(num_draft_tokens=7, num_rows=24, free_rows=2)
CHAIN = Budget(num_draft_tokens=7, num_rows=24, branches=False, probes=False, free_rows=2)
TEXTS = ([0, 1, 2, 3, 4, 5, 0, 2, 4], [1, 1, 2, 3, 5, 2, 1, 0])

MAKERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
    "lookahead": lambda: LookaheadDrafter(WindowSize(3, 3, 2), seed=4),
    "lookahead-deep": lambda: LookaheadDrafter(WindowSize(1, 5, 4)),
    "jacobi": lambda: JacobiDrafter(block=5, seed=3),
    "corpus": lambda: CorpusDrafter([index_of(TEXTS, SMALL.size)]),
    "prediction": lambda: PredictionDrafter([*TEXTS[0], *TEXTS[1]]),
    "spare-row": SpareRowDrafter,
    "composite": lambda: CompositeDrafter([SuffixDrafter(), RecyclingDrafter()]),
}
KEEPING = [name for name in MAKERS if name not in ("spare-row", "prediction")]

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
seeds = st.integers(0, 1000)
budgets = st.builds(
    lambda **limits: Budget(**limits),  # of a tuple, hypothesis would draw all fields
    num_draft_tokens=st.integers(0, 9),
    num_rows=st.integers(1, 24),
    branches=st.booleans(),
    probes=st.booleans(),
    free_rows=st.integers(1, 2),
    min_reach=st.sampled_from([0.0, 0.1]),
)


def model_of(seed: int) -> ScriptedModel:
    """Another model for each seed; half of them soon repeat themselves."""
    order = 1 + seed % 2
    next_logits = random_logits(VOCAB, order=order, scale=3.0)
    return ScriptedModel(lambda tokens: next_logits((*(t + 10 * seed for t in tokens),)), VOCAB)


def rounds(
    drafter: Drafter, model: ScriptedModel, prompt: Sequence[int], budgets: Sequence[Budget]
) -> list[TokenTree]:
    return [each.tree for each in greedy_rounds.rounds(drafter, model, prompt, budgets)]


def learnt(drafter: Drafter) -> np.ndarray:
    """Outcomes and right ones of each kind of draft token."""
    acceptance: Any = drafter._acceptance  # type: ignore[attr-defined]
    counts: np.ndarray = acceptance.state()["acceptance"][:2]
    return counts


def observe(drafter: Drafter, pending: int, *text: int) -> None:
    """A round in which nothing that was proposed is verified."""
    out = Forward(np.zeros((1, VOCAB), np.float32))
    drafter.observe(TokenTree.chain(pending), out, Verdict(text, (), False))


def shown(tree: TokenTree) -> list[Any]:
    return [tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.tolist()]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) and one[name].dtype == other[name].dtype
        for name in one
    )


@pytest.mark.parametrize("name", MAKERS)
@given(seed=seeds, prompt=prompts, limits=st.lists(budgets, min_size=8, max_size=8))
def test_a_round_keeps_its_budget_and_is_a_tree_of_draft_tokens(
    name: str, seed: int, prompt: list[int], limits: list[Budget]
) -> None:
    drafter = MAKERS[name]()
    for budget, tree in zip(limits, rounds(drafter, model_of(seed), prompt, limits), strict=True):
        most = budget.num_rows * (2 if name == "composite" else 1)  # its policy takes the likeliest
        assert len(tree) <= most and tree.depths.max() <= budget.num_draft_tokens
        assert tree.is_chain or budget.branches or budget.probes
        assert {name for each in tree.proposed_by[1:] for name in each.split("+")} <= {
            *drafter.name.split("+")
        }
        for row in range(len(tree)):
            children = tree.children(row)
            tokens = tree.tokens[children].tolist()
            assert len(set(tokens)) == len(tokens) and all(0 <= each < VOCAB for each in tokens)
            assert tree.confidence[children].sum() <= 1 + 1e-6
            assert (tree.confidence[children] >= 0).all()
            parent = int(tree.parents[row])
            if row and tree.required and tree.required[row]:
                assert parent == 0 or tree.required[parent]


@pytest.mark.parametrize("name", MAKERS)
@given(
    seed=seeds,
    prompt=prompts,
    text=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    data=st.data(),
)
def test_each_draft_token_that_the_text_decides_is_learnt_from_once(
    name: str, seed: int, prompt: list[int], text: list[int], data: st.DataObject
) -> None:
    drafter = MAKERS[name]()
    rounds(drafter, model_of(seed), prompt, [AMPLE] * 4)
    tree = drafter.propose(prompt[0], AMPLE)
    if data.draw(st.booleans()):  # a text that goes on along one of its paths
        path = tree.path(data.draw(st.integers(0, len(tree) - 1)))
        text = [*tree.tokens[path[1:]].tolist(), *text]
    decided = [
        (row, int(tree.tokens[row]) == text[depth - 1])
        for row, depth in enumerate(tree.depths.tolist())
        if row and depth <= len(text)
        and tree.tokens[tree.path(row)[1:-1]].tolist() == text[: depth - 1]
    ]  # fmt: skip
    before = learnt(drafter)
    observe(drafter, prompt[0], *text)
    seen, right = (learnt(drafter) - before).sum(axis=1).tolist()
    if name == "composite":  # of itself it learns about what several drafters know of
        assert seen <= len(decided) and right <= seen
    else:
        assert seen == pytest.approx(len(decided))
        assert right == pytest.approx(sum(each for _, each in decided))
    # A round without a proposal teaches nothing, nor does one whose answer was cut off.
    after = learnt(drafter)
    observe(drafter, text[-1], 1, 2)
    drafter.propose(2, AMPLE)
    drafter.begin(prompt)
    observe(drafter, prompt[-1], 3)
    assert np.array_equal(learnt(drafter), after)


@pytest.mark.parametrize("name", KEEPING)
@given(seed=seeds, first=prompts, second=prompts)
def test_another_prompt_begins_as_a_new_drafter_would(
    name: str, seed: int, first: list[int], second: list[int]
) -> None:
    used, fresh = MAKERS[name](), MAKERS[name]()
    rounds(used, model_of(seed), first, [AMPLE] * 5)
    used.propose(first[0], AMPLE)  # interrupted here
    for drafter in (used, fresh):
        drafter.begin(tuple(second))
    if name == "suffix" or not continues(first, second):
        kept, new = used.state(), fresh.state()
        for key in kept:
            assert key.endswith("acceptance") or np.array_equal(kept[key], new[key]), key
        found, expected = used.propose(second[-1], CHAIN), fresh.propose(second[-1], CHAIN)
        if name not in ("composite", "lookahead", "lookahead-deep", "corpus", "suffix"):
            assert found.tokens.tolist() == expected.tokens.tolist()
        assert used.propose(second[-1], Budget(0, 1)).tokens.tolist() == [second[-1]]


@pytest.mark.parametrize("name", ["recycling", "lookahead", "lookahead-deep"])
@given(seed=seeds, prompt=prompts, more=st.lists(st.integers(0, 3), max_size=4))
def test_the_next_turn_goes_on_with_what_is_known(
    name: str, seed: int, prompt: list[int], more: list[int]
) -> None:
    drafter = MAKERS[name]()
    rounds(drafter, model_of(seed), prompt, [AMPLE] * 5)
    known = {key: array.tolist() for key, array in drafter.state().items()}
    drafter.begin(prompt + more)
    now = drafter.state()
    if name == "recycling":
        assert now["tokens"].tolist() == known["tokens"] and known["tokens"]
        assert now["entries"].tolist() == known["entries"]
    else:
        first = {each[0] for each in known["pool"]}
        assert first <= {each[0] for each in now["pool"].tolist()}


@pytest.mark.parametrize("name", KEEPING)
@given(seed=seeds, prompt=prompts, num_rounds=st.integers(0, 8), pending=st.integers(0, 5))
def test_a_snapshot_carries_what_is_known(
    name: str, seed: int, prompt: list[int], num_rounds: int, pending: int
) -> None:
    drafter, fresh, other = (MAKERS[name]() for _ in range(3))
    rounds(drafter, model_of(seed), prompt, [AMPLE] * num_rounds)
    rounds(fresh, model_of(seed + 1), prompt[::-1], [AMPLE] * 3)
    state = drafter.state()
    fresh.load(state)
    assert same(fresh.state(), state)
    for each in (drafter, fresh):
        each.begin([*prompt, pending])
    assert shown(drafter.propose(pending, CHAIN)) == shown(fresh.propose(pending, CHAIN))
    fresh.load(other.state())  # of one that has seen nothing
    assert same(fresh.state(), other.state())


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_no_snapshot_is_refused_and_changes_nothing(name: str) -> None:
    drafter, other = MAKERS[name](), MAKERS[name]()
    rounds(drafter, model_of(1), [1, 2, 3, 1, 2], [AMPLE] * 5)
    rounds(other, model_of(2), [3, 2, 1, 3, 2], [AMPLE] * 5)
    before, valid = drafter.state(), other.state()
    wrong: list[dict[str, np.ndarray]] = []
    for key, array in valid.items():
        if "/" not in key:  # what lies below is another drafter's
            wrong.append({each: valid[each] for each in valid if each != key})
            more = array.astype(np.float64) if array.dtype.kind == "i" else array[:, :1]
            wrong += [valid | {key: each} for each in (array[None], more, np.asarray(array.sum()))]
    for state in wrong:
        with pytest.raises((KeyError, ValueError)):
            drafter.load(state)
        assert same(drafter.state(), before)
    drafter.load(valid)
    assert same(drafter.state(), valid)


@pytest.mark.parametrize("name", MAKERS)
@given(
    seed=seeds,
    prompt=prompts,
    max_tokens=st.integers(1, 24),
    stop=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    room=st.integers(1, 30),
)
def test_a_text_ends_where_plain_decoding_ends_it(
    decode: Any,
    greedy: Any,
    name: str,
    seed: int,
    prompt: list[int],
    max_tokens: int,
    stop: set[int],
    room: int,
) -> None:
    """At its maximum, with the context, or at a stop token, also inside an accepted run."""
    model = model_of(seed)
    model = ScriptedModel(model.next_logits, VOCAB, len(prompt) + room)
    drafter = MAKERS[name]()
    rounds(drafter, model_of(seed), prompt, [AMPLE] * 6)  # so that it knows the text
    expected = greedy(model, prompt, min(max_tokens, room + 1))
    ends = [at for at, token in enumerate(expected, start=1) if token in stop]
    run = decode(model, prompt, [drafter], max_tokens=max_tokens, stop_ids=[*stop])
    assert run.tokens == expected[: ends[0] if ends else None]


@pytest.mark.parametrize("name", sorted({*MAKERS} - {"corpus", "jacobi", "spare-row"}))
def test_a_text_that_repeats_itself_is_accepted(decode: Any, name: str) -> None:
    logits = np.eye(VOCAB, dtype=np.float32) * 9
    model = ScriptedModel(lambda tokens: logits[(tokens[-1] + 1) % VOCAB], VOCAB)
    run = decode(model, [0], [MAKERS[name]()], max_tokens=60)
    assert all((two - one) % VOCAB == 1 for one, two in pairwise(run.tokens))
    assert len(run.rounds) < 48

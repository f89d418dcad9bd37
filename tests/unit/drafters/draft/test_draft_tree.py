"""Trees that a draft writes: the text stays as it is, budgets are kept, samples decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Capabilities
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, likeliest
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.scheduler.policy import FixedPolicy, cut
from edge_spec.testing import NextLogits, ScriptedModel, random_logits
from fixtures.counting_session import CountingSession

VOCAB = 16
PROMPT = [3, 1, 4, 1, 5]
SHAPE = (-1, 0, 0, 0, 1, 1, 4, 2)
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=11)


def logits_of(seed: int = 0, vocab_size: int = VOCAB, scale: float = 4.0) -> NextLogits:
    logits = random_logits(vocab_size, order=3, scale=scale)
    return lambda tokens: logits((seed, *tokens[-2:]))


def half_right(tokens: tuple[int, ...]) -> np.ndarray:
    return logits_of(0 if sum(tokens[-3:]) % 2 else 1)(tokens)


def drafter_of(
    next_logits: NextLogits, vocab_size: int = VOCAB, **limits: int
) -> tuple[DraftModelDrafter, CountingSession]:
    model = ScriptedModel(next_logits, vocab_size, limits.get("context_length", 512))
    model.capabilities = Capabilities(
        limits.get("max_rows", 64), trees=True, rollback=True, hidden_states=False
    )
    session = CountingSession(model)
    return DraftModelDrafter(model, session, VOCAB), session


class Shaped(FixedPolicy):
    """Asks for samples in one shape."""

    def __init__(self, shape: tuple[int, ...] = SHAPE, min_confidence: float = 0.0) -> None:
        super().__init__(min_confidence=min_confidence)
        self._shape = shape

    def choose(self, drafters: Sequence[Any], pending: int, budget: Budget) -> Any:
        if budget.num_draft_tokens <= 0:
            return super().choose(drafters, pending, budget)
        shaped = Budget(budget.num_draft_tokens, budget.num_rows, shape=self._shape)
        tree = drafters[0].propose(pending, shaped)
        return cut(tree, shaped, self.min_confidence) or super().choose([], pending, budget)


def siblings_differ(tree: TokenTree) -> bool:
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    return len(set(pairs)) == len(pairs)


DRAFTS = {"perfect": logits_of(), "half right": half_right, "useless": logits_of(7)}


@pytest.mark.parametrize("quality", DRAFTS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_trees_of_candidates_give_the_plain_text(
    quality: str, params: SamplingParams, decode: Any
) -> None:
    """Greedy, and with a seed, which draws the same numbers at the same positions."""
    model = ScriptedModel(logits_of(), VOCAB)
    drafter, _ = drafter_of(DRAFTS[quality])
    policy = FixedPolicy(max_draft_tokens=6, min_confidence=0.05)
    run = decode(model, PROMPT, [drafter], params=params, max_tokens=50, policy=policy)
    assert run.tokens == decode(model, PROMPT, params=params, max_tokens=50).tokens
    if quality == "perfect":
        # Its first choice is always right, so each round ends for want of draft tokens.
        assert all(stats.num_accepted > 0 for stats in run.rounds if stats.num_draft_tokens)


@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 6),
    num_rows=st.integers(2, 20),
    min_reach=st.sampled_from([0.0, 0.05, 0.3]),
    max_rows=st.sampled_from([1, 2, 5, 64]),
    room=st.integers(1, 40),
)
def test_a_tree_of_candidates_keeps_its_budget(
    seed: int, count: int, num_rows: int, min_reach: float, max_rows: int, room: int
) -> None:
    """The round's and the draft's own: the rows of its passes and the room in its context."""
    context = len(PROMPT) + room - 1
    drafter, session = drafter_of(logits_of(seed), max_rows=max_rows, context_length=context)
    drafter.begin(PROMPT)
    tree = drafter.propose(PROMPT[-1], Budget(count, num_rows, min_reach=min_reach))
    num_passes = sum(rows > 0 for rows in session.calls)
    assert drafter.passes == num_passes <= count
    assert 1 < len(tree) <= num_rows
    assert tree.depths.max() <= min(count, room)
    assert siblings_differ(tree)
    assert tree.confidence.min() >= 0 and tree.confidence.max() <= 1
    for row in range(len(tree)):
        assert tree.confidence[tree.children(row)].sum() <= 1 + 1e-6  # float32
    assert set(tree.proposed_by[1:]) == {"draft-model"}
    parents = set(tree.parents.tolist()) - {-1}
    assert all(tree.reach[row] >= min_reach - 1e-6 for row in parents)


def sampled_run(
    drafter: DraftModelDrafter, policy: FixedPolicy, seed: int, count: int = 40
) -> tuple[list[int], int, int]:
    """The text, and how many of the rounds with draft tokens had one accepted."""
    model = ScriptedModel(logits_of(), VOCAB)
    session = model.open_session()
    session.prefill(PROMPT[:-1])
    params = SamplingParams(temperature=1.0, seed=seed)
    sampler = Sampler(params, PROMPT, sampled_drafts=True)
    limits = GenerationLimits(count, frozenset(), 512, 64)
    rounds: list[Any] = []
    decoded = Decoder(session, [drafter], policy).decode(PROMPT, sampler, limits, rounds.append)
    text = [token.id for tokens in decoded for token in tokens]
    drafted = [stats for stats in rounds if stats.num_draft_tokens]
    return text, len(drafted), sum(stats.num_accepted > 0 for stats in drafted)


def test_the_first_sample_of_a_draft_that_is_the_target_is_always_accepted() -> None:
    for seed in range(5):
        drafter, session = drafter_of(logits_of())
        _, drafted, accepted = sampled_run(drafter, Shaped(), seed)
        assert accepted == drafted > 5
        assert max(session.calls) > 3  # rows of several branches
        first, *others = drafter.sibling_acceptance
        assert first > 0.9 and max(others) < 0.1  # learnt: only the first child is ever right


def shaped(drafter: DraftModelDrafter, sampler: Sampler, budget: Budget) -> TokenTree:
    drafter.begin(PROMPT, sampler)
    return drafter.propose(PROMPT[-1], budget)


def test_what_is_drawn_decides_neither_the_shape_nor_the_confidence() -> None:
    """Dropping a sample because of its value would change the text's distribution."""
    seen = set()
    trees = []
    for seed in range(20):
        drafter, _ = drafter_of(logits_of(scale=1.0))
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT, sampled_drafts=True)
        tree = shaped(drafter, sampler, Budget(8, 64, shape=SHAPE))
        trees.append(tree)
        seen.add(tuple(tree.tokens.tolist()))
        assert siblings_differ(tree)
        assert tree.confidence.min() >= 0 and tree.confidence.max() <= 1
    assert len(seen) == 20
    for tree in trees:
        assert tree.parents.tolist() == trees[0].parents.tolist()
        assert tree.confidence.tolist() == trees[0].confidence.tolist()
    # Levels in their order; a row's siblings were sampled from the same distribution.
    assert trees[0].parents.tolist() == [-1, 0, 0, 0, 1, 1, 2, 4]
    for tree in trees:
        for row in range(len(tree)):
            probs = [tree.draft_probs[child] for child in tree.children(row)]
            assert all(other is probs[0] for other in probs)


def test_what_is_drawn_in_a_chain_does_not_decide_its_own_confidence() -> None:
    """A row's follows from what is above it."""
    confidence: dict[tuple[int, ...], float] = {}
    for seed in range(60):
        drafter, _ = drafter_of(logits_of(scale=3.0))
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT, sampled_drafts=True)
        tree = shaped(drafter, sampler, Budget(3, 64, branches=False))
        tokens = tuple(tree.tokens.tolist())
        for row in range(1, len(tree)):
            assert confidence.setdefault(tokens[:row], tree.confidence[row]) == tree.confidence[row]
    assert len(set(confidence.values())) > 2


def test_siblings_are_drawn_without_replacement_from_what_is_left() -> None:
    """First tokens as the draft's distribution has them, seconds as what it leaves of it."""
    draft_probs = np.array([0.6, 0.3, 0.1])
    counts = np.zeros((3, 3))
    model = ScriptedModel(lambda tokens: np.log(draft_probs).astype(np.float32), 3)
    drafter = DraftModelDrafter(model, model.open_session(), 3)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), [0], sampled_drafts=True)
    drafter.begin([0], sampler)
    trials = 4000
    for _ in range(trials):
        tree = drafter.propose(0, Budget(1, 8, shape=(-1, 0, 0)))
        counts[tuple(tree.tokens[1:])] += 1
        np.testing.assert_allclose(tree.draft_probs[1], draft_probs, atol=1e-6)
    for first in range(3):
        for second in range(3):
            left = draft_probs[second] / (1 - draft_probs[first])
            expected = draft_probs[first] * left if first != second else 0.0
            # Five standard deviations of a share of one half, the largest there is.
            error = 5 * 0.5 / trials**0.5
            assert counts[first, second] / trials == pytest.approx(expected, abs=error)


@pytest.mark.parametrize(
    ("support", "parents"),
    [
        (1, [-1, 0, 1, 2]),
        (2, [-1, 0, 0, 1, 1, 2, 3]),
        (3, [-1, 0, 0, 0, 1, 1, 2, 4]),
    ],
)
def test_a_support_smaller_than_the_shape_leaves_rows_out(support: int, parents: list[int]) -> None:
    def few(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.full(VOCAB, -np.inf, np.float32)
        logits[:support] = 0.0
        return logits

    drafter, _ = drafter_of(few)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), PROMPT, sampled_drafts=True)
    tree = shaped(drafter, sampler, Budget(8, 64, shape=SHAPE))
    assert siblings_differ(tree) and tree.tokens[1:].max() < support
    assert tree.parents.tolist() == parents


def test_no_sample_is_verified_without_those_that_were_drawn_before_it() -> None:
    """A second sample alone is distributed otherwise than its draft_probs say: where second ones
    are right more often than first ones, a policy would keep them alone."""
    drafter, _ = drafter_of(logits_of(scale=1.0))
    for _ in range(50):
        growth_of(drafter, [0, 0], right=1)
    first, second, *_ = drafter.sibling_acceptance
    assert first < 0.2 < 0.6 < second
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), PROMPT, sampled_drafts=True)
    budget = Budget(8, 64, shape=SHAPE)
    tree = shaped(drafter, sampler, budget)
    for num_rows in range(2, len(tree) + 1):
        for min_reach in (0.0, 0.02, 0.1, 0.3):
            kept = likeliest(tree, num_rows, min_reach)
            for row in range(len(kept)):
                children = [int(kept.tokens[child]) for child in kept.children(row)]
                path = kept.tokens[kept.path(row)].tolist()
                drawn = [
                    [int(tree.tokens[child]) for child in tree.children(original)]
                    for original in range(len(tree))
                    if tree.tokens[tree.path(original)].tolist() == path
                ]
                assert children == drawn[0][: len(children)]


def growth_of(drafter: DraftModelDrafter, parents: list[int], right: int) -> None:
    """Lets it learn of a round in which the child of this rank was the one that was accepted."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), PROMPT, sampled_drafts=True)
    tree = shaped(drafter, sampler, Budget(1, 8, shape=(-1, *parents)))
    drafter._growth.teach(drafter._acceptance, [int(tree.tokens[1 + right])])


@pytest.mark.parametrize("extra", [-5, 5])
@pytest.mark.parametrize("shape", [(), SHAPE])
def test_a_draft_of_another_vocabulary_samples_within_both(
    extra: int, shape: tuple[int, ...]
) -> None:
    """Options that name tokens which the draft lacks do not trouble it either."""
    drafter, _ = drafter_of(logits_of(0, VOCAB + extra), vocab_size=VOCAB + extra)
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        seed=2,
        logit_bias={VOCAB - 1: 1.5, 2: 0.5},
        presence_penalty=0.5,
        repetition_penalty=1.2,
    )
    prompt = [*PROMPT, VOCAB - 1]
    sampler = Sampler(params, prompt, sampled_drafts=True)
    sampler.observe([VOCAB - 1])
    drafter.begin(prompt, sampler)
    for _ in range(20):
        tree = drafter.propose(VOCAB - 1, Budget(4, 16, shape=shape, branches=bool(shape)))
        assert len(tree) > 1 and tree.tokens[1:].max() < min(VOCAB, VOCAB + extra)
        for token, probs in zip(tree.tokens[1:], tree.draft_probs[1:], strict=True):
            assert probs is not None and probs.shape == (VOCAB,)
            assert probs[token] > 0 and probs.sum() == pytest.approx(1)
            assert not probs[VOCAB + extra :].any()


@pytest.mark.parametrize("shape", [(), SHAPE])
def test_drafts_and_verdicts_draw_from_streams_of_their_own(shape: tuple[int, ...]) -> None:
    """A draft token that shared its numbers with the acceptance would be accepted too often."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=4), PROMPT, sampled_drafts=True)
    alike = Sampler(SamplingParams(temperature=1.0, seed=4), PROMPT, sampled_drafts=True)
    drafter, _ = drafter_of(logits_of(scale=1.0))
    shaped(drafter, sampler, Budget(8, 64, branches=bool(shape), shape=shape))
    for purpose in (Purpose.ACCEPTANCE, Purpose.RECOVERY):
        assert sampler.uniform(purpose) == alike.uniform(purpose)
    assert sampler.uniform(Purpose.DRAFT) != alike.uniform(Purpose.DRAFT)

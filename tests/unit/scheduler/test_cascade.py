"""Drafts that draft for drafts: the same draft tokens in fewer passes, and every level in
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.scheduler.adaptive import AdaptivePolicy, PolicyStage
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import NextLogits, ScriptedModel, ScriptedSession, random_logits

VOCAB = 24
PROMPT = [3, 1, 4, 1, 5]
CHAINS = FixedPolicy(branches=False)


def sharp(seed: int = 0, vocab_size: int = VOCAB) -> NextLogits:
    logits = random_logits(vocab_size, order=3, scale=8.0)
    return lambda tokens: logits((seed, *tokens[-2:]))


def mostly(share: int) -> NextLogits:
    """The target's own logits but after every `share`-th context."""

    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        return sharp(0 if (7 * tokens[-1] + sum(tokens[-3:])) % share else share)(tokens)

    return next_logits


class CountingSession(ScriptedSession):
    def __init__(self, model: CountingModel) -> None:
        super().__init__(model)
        self._counts = model

    def forward(self, tree: TokenTree) -> Forward:
        self._counts.passes += 1
        assert len(tree) <= self._counts.capabilities.max_rows
        assert tree.tokens.min() >= 0 and tree.tokens.max() < self._counts.config.vocab_size
        return super().forward(tree)


class CountingModel(ScriptedModel):
    def __init__(self, next_logits: NextLogits, vocab_size: int = VOCAB) -> None:
        super().__init__(next_logits, vocab_size, context_length=1024)
        self.capabilities = Capabilities(64, trees=False, rollback=True, hidden_states=False)
        self.passes = 0

    def open_session(self) -> CountingSession:
        return CountingSession(self)


def on_top(
    model: ScriptedModel, below: Sequence[Any] = (), policy: Any = CHAINS, vocab_size: int = VOCAB
) -> DraftModelDrafter:
    """A draft with these drafters below it."""
    level = PolicyStage(below, policy, model.capabilities.max_rows) if below else None
    return DraftModelDrafter(model, model.open_session(), vocab_size, level)


def models() -> tuple[CountingModel, CountingModel, CountingModel]:
    """A good draft, one that mostly agrees with it, and one that seldom does."""
    return tuple(CountingModel(mostly(share)) for share in (7, 5, 2))  # type: ignore[return-value]


def cascade(name: str) -> DraftModelDrafter:
    draft, small, tiny = models()
    match name:
        case "draft":
            return on_top(draft)
        case "suffix -> draft":
            return on_top(draft, [SuffixDrafter()])
        case "small -> draft":
            return on_top(draft, [on_top(small)])
        case "suffix -> small -> draft":
            return on_top(draft, [on_top(small, [SuffixDrafter()])])
        case "suffix, small -> draft":
            return on_top(draft, [SuffixDrafter(), on_top(small)])
        case _:
            return on_top(draft, [on_top(small, [on_top(tiny, [SuffixDrafter()])])])


NAMES = (
    "suffix -> draft",
    "small -> draft",
    "suffix -> small -> draft",
    "suffix, small -> draft",
    "suffix -> tiny -> small -> draft",
)


class Recording(Drafter):
    """Another drafter, whose proposals are kept."""

    def __init__(self, drafter: DraftModelDrafter) -> None:
        self.name = drafter.name
        self.trees: list[TokenTree] = []
        self._drafter = drafter

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self._drafter.begin(prompt, sampler)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._drafter.observe(tree, out, verdict)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self.trees.append(self._drafter.propose(pending, budget))
        return self.trees[-1]


def write(
    drafters: Sequence[Any], params: SamplingParams, sampled: bool = False, count: int = 60
) -> list[int]:
    """The text. sampled: whether drafts may be sampled on their own."""
    model = ScriptedModel(sharp(), VOCAB)
    session = model.open_session()
    session.prefill(PROMPT[:-1])
    sampler = Sampler(params, PROMPT, sampled_drafts=sampled)
    limits = GenerationLimits(count, frozenset(), model.config.context_length, 64)
    decoder = Decoder(session, drafters, CHAINS)
    rounds = decoder.decode(PROMPT, sampler, limits, lambda stats: None)
    return [token.id for decoded in rounds for token in decoded]


GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.0, seed=5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_the_text_is_the_plain_one(name: str, params: SamplingParams) -> None:
    """Sampled too: every level takes part in the same races of random numbers."""
    drafter = Recording(cascade(name))
    assert write([drafter], params) == write([], params)
    assert sum(len(tree) - 1 for tree in drafter.trees) > 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("params", "sampled"), [(GREEDY, False), (SEEDED, False), (SEEDED, True)])
def test_a_draft_draft_tokens_the_same_with_and_without_levels_below(
    name: str, params: SamplingParams, sampled: bool
) -> None:
    alone, on_others = Recording(cascade("draft")), Recording(cascade(name))
    assert write([alone], params, sampled) == write([on_others], params, sampled)
    assert len(alone.trees) == len(on_others.trees)
    for lone, tree in zip(alone.trees, on_others.trees, strict=True):
        assert lone.tokens.tolist() == tree.tokens.tolist()
        assert lone.confidence.tolist() == tree.confidence.tolist()
        for one, other in zip(lone.draft_probs, tree.draft_probs, strict=True):
            assert (one is None and other is None) or np.array_equal(one, other)
    assert sampled == any(tree.draft_probs for tree in alone.trees)


def test_levels_save_passes_where_they_draft_token_well() -> None:
    """A text that repeats itself is drafted in one pass of each model."""

    def repeats(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(VOCAB, np.float32)
        logits[(tokens[-1] + 1) % 5] = 9.0
        return logits

    def passes_of_a_draft(*below: Any) -> int:
        draft = CountingModel(repeats)
        drafter = on_top(draft, below)
        drafter.begin([0, 1, 2, 3, 4] * 4)
        tree = drafter.propose(4, Budget(12, 64, branches=False))
        assert tree.tokens.tolist() == [4, *([0, 1, 2, 3, 4] * 3)[:12]]
        return draft.passes

    assert passes_of_a_draft() == 12
    assert passes_of_a_draft(SuffixDrafter()) == 1
    small = CountingModel(repeats)
    assert passes_of_a_draft(on_top(small, [SuffixDrafter()])) == small.passes == 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("useful", "most", "least"), [(False, 60, 1), (True, 1000, 300)])
def test_a_level_that_wins_nothing_rests(useful: bool, most: int, least: int) -> None:
    """Its draft tokens take a third of a pass of the draft: with nothing right that is a loss."""
    clock = Clock()
    draft = CountingModel(sharp())
    small = CountingModel(sharp(0 if useful else 9))

    class Timed(CountingSession):
        def forward(self, tree: TokenTree) -> Forward:
            clock.now += 0.3 if self._counts is small else 1 + 0.1 * (len(tree) - 1)
            return super().forward(tree)

    policy = AdaptivePolicy(
        RowCosts({1: 1.0, 8: 1.7}), {}, branches=False, probes=False, clock=clock
    )
    lower = DraftModelDrafter(small, Timed(small), VOCAB)
    level = PolicyStage([lower], policy, 64, clock)
    drafter = DraftModelDrafter(draft, Timed(draft), VOCAB, level)
    drafter.begin(PROMPT)
    tokens, written = list(PROMPT), 0
    while written < 500:
        tree = drafter.propose(tokens[-1], Budget(8, 64, branches=False))
        verdict = Verdict((*tree.tokens[1:].tolist(), 0), tuple(range(1, len(tree))), True)
        drafter.observe(tree, Forward(np.zeros((1, VOCAB), np.float32)), verdict)
        tokens += verdict.tokens
        written += len(tree) - 1
    assert least < small.passes < most
    if useful:
        assert clock.now < 0.8 * written
    else:
        assert clock.now < 1.05 * (written + written / 8 * 0.1)  # catching up has a row more


def test_draft_tokens_that_the_draft_cannot_read_are_not_shown_to_it() -> None:
    """The target writes tokens that its draft lacks; suffix lookup below the draft knows them."""
    draft = CountingModel(sharp())
    drafter = on_top(draft, [SuffixDrafter()], vocab_size=VOCAB + 8)
    text = [1, VOCAB + 2, 1, 2] * 6
    drafter.begin(text)
    tree = drafter.propose(text[-1], Budget(6, 64, branches=False))
    assert len(tree) == 7 and tree.tokens.max() < VOCAB
    drafter.begin([*text, 1, VOCAB + 2])
    tree = drafter.propose(VOCAB + 2, Budget(6, 64, branches=False))
    assert len(tree) == 7 and tree.tokens[0] == VOCAB + 2

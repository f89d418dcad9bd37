"""What a draft has read ahead of a text: used where the text goes there, forgotten elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.draft.synced_session import DraftAheadCache, Reading
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import ScriptedModel, random_logits
from fixtures import text_distribution as text
from fixtures.counting_session import CountingSession

VOCAB = 12
PROMPT = [3, 1, 4, 1, 5]
NO_SCORES = Forward(np.zeros((1, 1), np.float32))
# Every token so far decides the next: any wrong one in a cache shows.
DRAFT = ScriptedModel(random_logits(VOCAB, order=10_000, scale=3.0), VOCAB)


def drafter_of(
    anticipates: bool = True, model: ScriptedModel = DRAFT
) -> tuple[DraftModelDrafter, CountingSession]:
    session = CountingSession(model)
    vocab_size = model.config.vocab_size
    return DraftModelDrafter(model, session, vocab_size, anticipates=anticipates), session


def budget(count: int, branches: bool = False) -> Budget:
    return Budget(count, 1 + count if branches else 64, branches=branches)


def passes(count: int) -> Callable[[], bool]:
    """Whether to stop, asked before each of that many readings and once more."""
    answers = iter([False] * count)
    return lambda: next(answers, True)


def write(drafter: DraftModelDrafter, tree: TokenTree, tokens: Sequence[int]) -> None:
    """The text goes on with these."""
    row, rows = 0, []
    for token in tokens:
        child = tree.child(row, token)
        if child is None:
            break
        row = child
        rows.append(row)
    drafter.observe(tree, NO_SCORES, Verdict(tuple(tokens), tuple(rows), False))


def choice(tokens: Sequence[int], rank: int = 0) -> int:
    """Of the draft after a text."""
    order: list[int] = np.argsort(-DRAFT.next_logits(tuple(tokens)), kind="stable").tolist()
    return order[rank]


@pytest.mark.parametrize("branches", [False, True])
def test_the_likeliest_outcome_finds_its_draft_tokens_ready(branches: bool) -> None:
    drafter, session = drafter_of()
    drafter.begin(PROMPT)
    tree = drafter.propose(PROMPT[-1], budget(3, branches))
    assert drafter.anticipates and not drafter.was_ready
    drafter.anticipate(passes(40))
    written = [*PROMPT]
    while len(written) < len(PROMPT) + 2:  # what the draft itself would write is the likeliest
        written.append(choice(written))
    write(drafter, tree, written[len(PROMPT) :])
    session.taken()
    tree = drafter.propose(written[-1], budget(1))
    assert drafter.was_ready and session.taken() == []
    assert tree.tokens[1] == choice(written)
    # And it goes on from there.
    write(drafter, tree, [choice(written)])
    written.append(choice(written))
    tree = drafter.propose(written[-1], budget(1))
    assert tree.tokens[1] == choice(written)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_draft_tokens_are_those_of_a_draft_that_did_not_anticipate(
    seed: int, branches: bool
) -> None:
    """Whatever is written and however far it came; and its cache holds what it should."""
    rng = np.random.default_rng(seed)
    (drafter, session), (other, _) = drafter_of(), drafter_of(anticipates=False)
    written = list(PROMPT)
    ready = 0
    for each in (drafter, other):
        each.begin(written)
    for _ in range(30):
        limits = budget(int(rng.integers(1, 5)), branches)
        tree, expected = (each.propose(written[-1], limits) for each in (drafter, other))
        assert tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        np.testing.assert_array_equal(tree.confidence, expected.confidence)
        ready += drafter.was_ready
        drafter.anticipate(passes(int(rng.integers(0, 8))))
        new: list[int] = []
        for _ in range(int(rng.integers(1, len(tree) + 1))):
            new.append(choice([*written, *new], rank=int(rng.random() < 0.3)))
        for each in (drafter, other):
            write(each, tree, new)
        written += new
        assert session.committed == drafter._text._held
    assert ready > 3


def test_nothing_is_read_beyond_the_drafts_context() -> None:
    model = ScriptedModel(DRAFT.next_logits, VOCAB, context_length=8)
    drafter, session = drafter_of(model=model)
    drafter.begin(PROMPT)
    drafter.propose(PROMPT[-1], budget(9))
    drafter.anticipate(passes(100))
    assert session.length <= 8
    drafter.begin(PROMPT + [1] * 4)  # too long by now
    assert len(drafter.propose(1, budget(9))) == 1 and not drafter.anticipates


class Selecting(DraftAheadCache):
    """Broken: a sample is used only where it is a likely one, and drawn again elsewhere."""

    def get(self, path: Sequence[int]) -> Reading | None:
        reading = super().get(path)
        likely = reading is not None and reading.candidate.token == reading.likeliest[0][0]
        return reading if likely else None


def sampled_p_value(ahead: DraftAheadCache, draws: int) -> float:
    """Of the first tokens of texts whose draft tokens are sampled, mostly ahead of the text."""
    vocab, prompt = 3, (1, 2)
    params = SamplingParams(temperature=1.0)
    logits = cache(random_logits(vocab, order=2, scale=1.0))
    target = ScriptedModel(logits, vocab)
    draft = ScriptedModel(cache(lambda tokens: logits(tokens[1:])), vocab)
    drafter = DraftModelDrafter(draft, draft.open_session(), vocab, anticipates=True)
    drafter._ahead = ahead
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), prompt, sampled_drafts=True)
    session = target.open_session()
    counts: Counter[tuple[int, ...]] = Counter()
    ready = 0
    for draw in range(draws):
        session.rollback(0)
        session.prefill(prompt[:-1])
        drafter.begin(prompt, sampler)
        written: list[int] = []
        while len(written) < text.LENGTH:
            tree = drafter.propose([*prompt, *written][-1], budget(1 + draw % 2))
            ready += drafter.was_ready
            out = session.forward(tree)
            drafter.anticipate(passes(5 + draw % 5))
            verdict = verify(tree, out, sampler)
            session.commit(verdict.kept)
            sampler.observe(verdict.tokens)
            drafter.observe(tree, out, verdict)
            written += verdict.tokens
        counts[tuple(written[: text.LENGTH])] += 1
    assert ready > draws / 8  # otherwise nothing was tried
    return float(text.p_value(counts, text.joint(logits, prompt, params)))


def test_samples_drawn_ahead_leave_the_text_its_distribution() -> None:
    assert sampled_p_value(DraftAheadCache(), 2500) > text.SMALLEST_P


def test_samples_that_are_used_for_their_value_fail_the_same_check() -> None:
    assert sampled_p_value(Selecting(), 2500) < text.SMALLEST_P

"""The round loop: greedy text equals plain text, and the cache equals what was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.metrics import PlainReason
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.draft_overlap import OverlappedDrafting
from edge_spec.engine.results import Origin
from edge_spec.scheduler.policy import FixedPolicy, RoundPlan
from edge_spec.testing import ScriptedModel, random_logits

Candidates = tuple[list[int], list[int]]  # tokens and the rows of their parents
PROMPT = [1, 2, 0, 1]
BESIDE = OverlappedDrafting(reads_prompts=True)


def branching(model: ScriptedModel, seed: int) -> Any:
    """Random trees, half of whose tokens are the target's choice; siblings may be equal."""

    def candidate(text: tuple[int, ...], budget: Budget) -> Candidates:
        rng = np.random.default_rng([seed, len(text)])
        paths, tokens, parents = [text], [], []
        for row in range(rng.integers(0, min(12, budget.num_rows))):
            parent = int(rng.integers(max(0, row - 2), row + 1))
            right = int(model.next_logits(paths[parent]).argmax())
            token = right if rng.random() < 0.5 else int(rng.integers(model.config.vocab_size))
            tokens.append(token)
            parents.append(parent)
            paths.append((*paths[parent], token))
        return tokens, parents

    return candidate


def adversarial(model: ScriptedModel, seed: int) -> Any:
    """The least likely tokens, as a chain with a sibling at each depth."""

    def candidate(text: tuple[int, ...], budget: Budget) -> Candidates:
        order = model.next_logits(text).argsort().tolist()
        rows = min(6, budget.num_rows - 1)
        return [order[row % 2] for row in range(rows)], [row // 2 * 2 for row in range(rows)]

    return candidate


def right_then_wrong(script: Sequence[int], start: int, right: int, wrong: int = 0) -> Any:
    """A chain of the next `right` tokens of a script that begins at `start`, then wrong ones."""

    def candidate(text: tuple[int, ...], budget: Budget) -> Candidates:
        ahead = list(script[len(text) - start :][:right]) + [99] * wrong
        ahead = ahead[: budget.num_draft_tokens]
        return ahead, list(range(len(ahead)))

    return candidate


@pytest.mark.parametrize("kind", [branching, adversarial])
@given(vocab=st.integers(3, 8), seed=st.integers(0, 10_000), length=st.integers(1, 40))
def test_any_drafter_gives_the_plain_greedy_tokens(
    decode: Any, greedy: Any, tree_drafter: Any, kind: Any, vocab: int, seed: int, length: int
) -> None:
    logits = random_logits(vocab, order=3)
    model = ScriptedModel(lambda tokens: logits((seed, *tokens[-2:])), vocab)
    drafter = tree_drafter(kind(model, seed))
    run = decode(model, PROMPT, [drafter], max_tokens=length)
    assert run.tokens == greedy(model, PROMPT, length)
    assert decode(model, PROMPT, max_tokens=length).tokens == run.tokens


@given(vocab=st.integers(3, 8), seed=st.integers(0, 10_000), order=st.integers(1, 3))
def test_suffix_lookup_gives_the_plain_greedy_tokens(
    decode: Any, greedy: Any, vocab: int, seed: int, order: int
) -> None:
    logits = random_logits(vocab, order=order + 1)
    model = ScriptedModel(lambda tokens: logits((seed, *tokens[-order:])), vocab)
    run = decode(model, PROMPT, [SuffixDrafter()], max_tokens=60)
    assert run.tokens == greedy(model, PROMPT, 60)
    assert sum(stats.num_accepted for stats in run.rounds) > 0  # short orders repeat themselves


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", [branching, adversarial, None])
def test_a_seed_gives_the_same_text_with_and_without_drafting(
    decode: Any, tree_drafter: Any, kind: Any, temperature: float
) -> None:
    model = ScriptedModel(random_logits(5), 5)
    for seed in range(20):
        params = SamplingParams(temperature=temperature, seed=seed, repetition_penalty=1.1)
        drafter = tree_drafter(kind(model, seed)) if kind else SuffixDrafter()
        drafted = decode(model, PROMPT, [drafter], params=params, max_tokens=30)
        assert drafted.tokens == decode(model, PROMPT, params=params, max_tokens=30).tokens


SCRIPT = [10, 11, 12, 13, 14, 15, 16, 17]


def test_origins_tell_how_each_token_came_about(
    decode: Any, scripted: Any, tree_drafter: Any
) -> None:
    model = scripted(2, SCRIPT)
    drafter = tree_drafter(right_then_wrong(SCRIPT, start=2, right=2, wrong=1))
    run = decode(model, [1, 2], [drafter], max_tokens=7)
    accepted, plain = (Origin.ACCEPTED, "test"), (Origin.PLAIN, "")
    recovered, bonus = (Origin.RECOVERED, ""), (Origin.BONUS, "")
    # The last round has one token left to write and therefore no draft token.
    assert [token[1:3] for token in run.decoded] == [accepted, accepted, recovered] * 2 + [plain]
    drafter = tree_drafter(right_then_wrong(SCRIPT, start=2, right=3))
    run = decode(model, [1, 2], [drafter], max_tokens=4)
    assert [token[1:3] for token in run.decoded] == [accepted] * 3 + [bonus]
    assert run.tokens == SCRIPT[:4]


@pytest.mark.parametrize(
    ("stop", "tokens", "rounds", "last"),
    [
        (11, 2, [2], Origin.ACCEPTED),
        (12, 3, [3], Origin.ACCEPTED),
        (13, 4, [4], Origin.BONUS),
        (14, 5, [4, 1], Origin.ACCEPTED),
    ],
)
def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(
    decode: Any,
    scripted: Any,
    tree_drafter: Any,
    stop: int,
    tokens: int,
    rounds: list[int],
    last: Origin,
) -> None:
    drafter = tree_drafter(right_then_wrong(SCRIPT, start=2, right=3))
    run = decode(scripted(2, SCRIPT), [1, 2], [drafter], stop_ids=[stop])
    assert run.tokens == SCRIPT[:tokens]
    assert [stats.num_tokens for stats in run.rounds] == rounds
    assert run.decoded[-1].origin == last
    assert run.session.length == 1 + tokens
    assert (
        sum(stats.num_accepted for stats in run.rounds)
        == Counter(token.origin for token in run.decoded)[Origin.ACCEPTED]
    )


@pytest.mark.parametrize("max_tokens", range(9))
def test_max_tokens_is_exact(
    decode: Any, scripted: Any, tree_drafter: Any, max_tokens: int
) -> None:
    drafter = tree_drafter(right_then_wrong(SCRIPT, start=2, right=3))
    run = decode(scripted(2, SCRIPT), [1, 2], [drafter], max_tokens=max_tokens)
    assert run.tokens == SCRIPT[:max_tokens]
    assert run.session.length == 1 + max_tokens


def test_draft_tokens_beyond_the_budget_are_cut_at_max_tokens(
    decode: Any, greedy: Any, tree_drafter: Any
) -> None:
    model = ScriptedModel(random_logits(4), 4)
    for max_tokens in range(1, 12):
        drafter = tree_drafter(branching(model, seed=max_tokens))  # ignores num_draft_tokens
        run = decode(model, PROMPT, [drafter], max_tokens=max_tokens)
        assert run.tokens == greedy(model, PROMPT, max_tokens)


@pytest.mark.parametrize("context_length", range(4, 14))
def test_the_text_ends_with_the_context(
    decode: Any, greedy: Any, tree_drafter: Any, context_length: int
) -> None:
    model = ScriptedModel(random_logits(4), 4, context_length)
    drafter = tree_drafter(branching(model, seed=1))
    run = decode(model, PROMPT, [drafter], max_tokens=100)
    # The last token needs no place in the cache.
    count = context_length - len(PROMPT) + 1
    assert run.tokens == greedy(model, PROMPT, count)
    assert run.session.length == context_length


def test_each_plain_round_says_why(decode: Any, scripted: Any, tree_drafter: Any) -> None:
    model = scripted(2, SCRIPT)
    no_draft_token = tree_drafter(lambda text, budget: ([], []))
    reasons = [stats.plain_reason for stats in decode(model, [1, 2], max_tokens=2).rounds]
    assert reasons == [PlainReason.OFF] * 2
    reasons = [s.plain_reason for s in decode(model, [1, 2], [no_draft_token], max_tokens=3).rounds]
    assert reasons == [PlainReason.NO_CANDIDATE] * 2 + [PlainReason.BUDGET]
    drafter = tree_drafter(right_then_wrong(SCRIPT, start=2, right=1))
    rounds = decode(model, [1, 2], [drafter], max_tokens=3).rounds
    assert [s.plain_reason for s in rounds] == [None, PlainReason.BUDGET]
    assert [(s.num_draft_tokens, s.num_accepted, s.num_tokens) for s in rounds] == [
        (1, 1, 2),
        (0, 0, 1),
    ]


def test_rows_beyond_those_to_verify_are_seen_by_drafters_and_never_accepted(
    decode: Any, scripted: Any
) -> None:
    seen: list[int] = []

    class Probing(SuffixDrafter):
        def observe(self, tree: Any, out: Any, verdict: Any) -> None:
            seen.extend(int(token) for token in tree.tokens[1:])
            assert len(out.logits) == len(tree)

    class First(FixedPolicy):
        def choose(self, drafters: Any, pending: int, budget: Budget) -> RoundPlan:
            draft_tokens = SCRIPT[SCRIPT.index(pending) + 1 :] if pending in SCRIPT else SCRIPT
            tree = TokenTree.chain(pending, draft_tokens[:3], drafter="test")
            return RoundPlan(tree, None, num_verified=2)

    run = decode(scripted(2, SCRIPT), [1, 2], [Probing()], max_tokens=4, policy=First())
    assert run.tokens == SCRIPT[:4] and seen == [*SCRIPT[:3], *SCRIPT[2:5]]
    assert [stats.num_tokens for stats in run.rounds] == [2, 2]  # one draft token and one more
    assert [stats.num_draft_tokens for stats in run.rounds] == [1, 1]
    assert [token.origin for token in run.decoded] == [Origin.ACCEPTED, Origin.BONUS] * 2
    assert run.rounds[0].by_drafter == {"test": (1, 1)}


class Reading(SuffixDrafter):
    """Notes when it reads a prompt, from `may_read` on."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events
        self.may_read, self.has_read = Event(), Event()

    def prepare(self, prompt: Sequence[int]) -> None:
        assert self.may_read.wait(timeout=60)
        self._events.append("draft")
        self.has_read.set()


def test_a_draft_reads_the_prompt_while_the_target_does_or_after_it() -> None:
    model = ScriptedModel(random_logits(5), 5)
    events: list[str] = []
    drafter = Reading(events)
    decoder = Decoder(model.open_session(), [drafter], FixedPolicy())
    with decoder.preparing([1, 2]):
        drafter.may_read.set()
        events.append("target")
    assert events == ["target", "draft"]

    events.clear()
    drafter = Reading(events)
    with replace(decoder, drafters=[drafter], overlap=BESIDE).preparing([1, 2]):
        drafter.may_read.set()  # it would wait in vain before the block
        assert drafter.has_read.wait(timeout=60)
        events.append("target")
    assert events == ["draft", "target"]


def test_an_interrupt_does_not_leave_a_draft_that_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Reading([])

    class InterruptedThread(Thread):
        joins = 0

        def join(self, timeout: float | None = None) -> None:
            self.joins += 1
            if self.joins == 1:
                raise KeyboardInterrupt
            drafter.may_read.set()
            super().join(timeout)

    monkeypatch.setattr("edge_spec.engine.decoder.Thread", InterruptedThread)
    model = ScriptedModel(random_logits(5), 5)
    decoder = Decoder(model.open_session(), [drafter], FixedPolicy(), overlap=BESIDE)
    with pytest.raises(KeyboardInterrupt), decoder.preparing([1, 2]):
        pass
    assert drafter.has_read.is_set()

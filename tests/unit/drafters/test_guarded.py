"""A drafter that fails is dropped with a reason; the text stays what plain decoding writes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import CompositeDrafter, GuardedDrafter
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import GREEDY, Budget
from edge_spec.testing import ScriptedModel, random_logits

VOCAB = 5
PROMPT = [1, 2, 0, 1]


class Faulty(SuffixDrafter):
    """Suffix lookup that goes wrong in one method, at its third call."""

    name = "faulty"

    def __init__(self, where: str, fault: Any) -> None:
        super().__init__()
        self._where, self._fault = where, fault
        self.calls = 0

    def _goes_wrong(self, where: str) -> bool:
        self.calls += where == self._where
        return where == self._where and self.calls >= (1 if where == "begin" else 3)

    def begin(self, prompt: Any, sampler: Any = GREEDY) -> None:
        if self._goes_wrong("begin"):
            self._fault(None)
        super().begin(prompt, sampler)

    def propose(self, pending: int, budget: Any) -> TokenTree:
        tree = super().propose(pending, budget)
        return self._fault(tree) if self._goes_wrong("propose") else tree

    def observe(self, tree: Any, out: Any, verdict: Any) -> None:
        if self._goes_wrong("observe"):
            self._fault(tree)
        super().observe(tree, out, verdict)


def raises(tree: Any) -> Any:
    raise RuntimeError("the index\nis broken")


def out_of_memory(tree: Any) -> Any:
    raise MemoryError


def tree_with(**arrays: Any) -> Any:
    def fault(tree: TokenTree) -> TokenTree:
        parts = {"tokens": [tree.tokens[0], 1], "parents": [-1, 0], "confidence": [1.0, 0.9]}
        parts |= arrays
        return TokenTree(*(np.array(part) for part in parts.values()))

    return fault


def proposing(draft_token: float) -> Any:
    """A chain of the pending token and this one."""

    def fault(tree: TokenTree) -> TokenTree:
        made: TokenTree = tree_with(tokens=[tree.tokens[0], draft_token])(tree)
        return made

    return fault


def sampled_from(*probs: float) -> Any:
    def fault(tree: TokenTree) -> TokenTree:
        chain = TokenTree.chain(int(tree.tokens[0]), [1])
        return replace(chain, draft_probs=(None, np.array(probs)))

    return fault


def named_by_nobody(tree: TokenTree) -> TokenTree:
    chain = TokenTree.chain(int(tree.tokens[0]), [1])
    return replace(chain, proposed_by=("", None))  # type: ignore[arg-type]


def needed_below_what_is_not(tree: TokenTree) -> TokenTree:
    pending = int(tree.tokens[0])
    return replace(TokenTree.chain(pending, [1, 2], [0.1, 0.1]), required=(True, False, True))


FAULTS = [
    ("begin", raises),
    ("propose", raises),
    ("propose", out_of_memory),
    ("observe", raises),
    ("propose", lambda tree: None),
    ("propose", tree_with(tokens=[4, 1])),  # not the pending token, as a rule
    ("propose", proposing(VOCAB)),
    ("propose", proposing(-1)),
    ("propose", tree_with(confidence=[1.0, float("nan")])),
    ("propose", tree_with(confidence=[1.0, 1.5])),
    ("propose", tree_with(parents=[-1, 1])),
    ("propose", tree_with(confidence=[1.0])),
    ("propose", proposing(1.0)),
    ("propose", needed_below_what_is_not),
    ("propose", named_by_nobody),
    ("propose", tree_with(tokens=[[0], [1]])),
    # A sample that is verified against what is no distribution would bend the text's.
    ("propose", sampled_from(0.2, 0.2, 0.2, 0.2, np.nan)),
    ("propose", sampled_from(0.2, 0.4, 0.2, 0.2, 0.2)),
    ("propose", sampled_from(0.2, 0.2, 0.2, 0.2, 0.1)),
    ("propose", sampled_from(0.2, 0.9, 0.2, 0.2, -0.5)),
    ("propose", sampled_from(0.5, 0.5)),
]


@pytest.mark.parametrize(("where", "fault"), FAULTS)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1, seed=3)])
def test_a_failing_drafter_is_dropped_and_the_text_is_the_plain_one(
    decode: Any, caplog: Any, where: str, fault: Any, params: SamplingParams
) -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    guarded = GuardedDrafter(Faulty(where, fault), VOCAB)
    with caplog.at_level(logging.WARNING, "edge_spec"):
        run = decode(model, PROMPT, [guarded], params=params, max_tokens=40)
        again = decode(model, PROMPT, [guarded], params=params, max_tokens=40)
    plain = decode(model, PROMPT, params=params, max_tokens=40)
    assert run.tokens == again.tokens == plain.tokens
    assert guarded.fault
    assert len(caplog.records) == 1  # although it was tried again
    message = caplog.records[0].getMessage()
    assert (
        "faulty" in message and guarded.fault.partition(":")[0] in message and "\n" not in message
    )
    assert sum(stats.num_draft_tokens > 0 for stats in again.rounds) <= 1


def test_of_several_drafters_only_those_that_share_a_tree_with_the_failing_one_are_dropped(
    decode: Any,
) -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    merged = CompositeDrafter([Faulty("propose", raises), RecyclingDrafter()])
    faulty, sound = GuardedDrafter(merged, VOCAB), GuardedDrafter(SuffixDrafter(), VOCAB)
    run = decode(model, PROMPT, [faulty, sound], max_tokens=60)
    assert run.tokens == decode(model, PROMPT, max_tokens=60).tokens
    assert faulty.fault == "RuntimeError: the index is broken" and sound.fault is None
    accepted = [token.drafter for token in run.decoded if token.drafter]
    assert accepted and accepted[-1] == "suffix"


def test_a_failing_drafter_is_tried_again_after_ever_longer_rests() -> None:
    begun: list[str | None] = []

    class Broken(SuffixDrafter):
        def begin(self, prompt: Any, sampler: Any = GREEDY) -> None:
            begun.append(self.fault)
            if len(begun) < 4:
                raises(None)

    inner = Broken()
    guarded = GuardedDrafter(inner, VOCAB)
    tried = []
    for answer in range(10):
        before = len(begun)
        guarded.begin(PROMPT)
        tried += [answer] * (len(begun) - before)
    assert tried == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert begun == [None, *["RuntimeError: the index is broken"] * 3, *[None] * 5]
    assert guarded.fault is None and inner.fault is None


def test_one_that_fails_in_reading_the_prompt_is_not_begun_in_this_answer() -> None:
    class Broken(SuffixDrafter):
        def prepare(self, prompt: Any) -> None:
            raises(None)

    guarded = GuardedDrafter(Broken(), VOCAB)
    guarded.prepare(PROMPT)
    guarded.begin(PROMPT)
    assert guarded.fault is not None
    guarded.prepare(PROMPT)  # of the next answer
    guarded.begin(PROMPT)
    assert guarded.fault is None


def test_one_that_has_failed_is_attached_to_the_session_that_it_is_tried_again_with() -> None:
    attached = []

    class Attached(Faulty):
        def attach(self, model: Any, session: Any) -> None:
            attached.append(session)

    guarded = GuardedDrafter(Attached("begin", raises), VOCAB)
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    sessions = [model.open_session(), model.open_session()]
    guarded.attach(model, sessions[0])
    guarded.begin(PROMPT)
    fault = guarded.fault
    guarded.attach(model, sessions[1])
    assert attached == sessions and fault is not None and guarded.fault == fault


def test_an_interrupt_is_no_fault() -> None:
    def interrupt(tree: Any) -> Any:
        raise KeyboardInterrupt

    guarded = GuardedDrafter(Faulty("begin", interrupt), VOCAB)
    with pytest.raises(KeyboardInterrupt):
        guarded.begin(PROMPT)
    assert guarded.fault is None


def test_the_engine_guards_every_drafter_it_loads(make_engine: Any, monkeypatch: Any) -> None:
    model = ScriptedModel(random_logits(260), 260)
    engine = make_engine(model)
    plain = engine.generate([1, 2, 1, 2], max_tokens=20)
    monkeypatch.setattr(SuffixDrafter, "propose", raises)  # called with too many arguments
    for names in ("suffix", "suffix,recycling"):
        engine.set_drafter(names)
        drafted = engine.generate([1, 2, 1, 2], max_tokens=20)
        assert [t.id for t in drafted.tokens] == [t.id for t in plain.tokens]


class Samples(SuffixDrafter):
    """Of one distribution, below the pending token."""

    def __init__(self, *confidence: float) -> None:
        super().__init__()
        self._confidence = confidence

    def propose(self, pending: int, budget: Any) -> TokenTree:
        count, probs = len(self._confidence), np.full(4, 0.25)
        return TokenTree(
            np.array([pending, *range(1, 1 + count)], np.int32),
            np.array([-1, *[0] * count], np.int32),
            np.array([1, *self._confidence], np.float32),
            draft_probs=(None, *[probs] * count),
        )


@pytest.mark.parametrize(
    ("confidence", "dropped"),
    [
        ((0.5, 0.6), True),
        ((0.5, 0.5), False),
        ((0.5, 0.1), False),
        ((0.5, 0.3, 0.4), True),  # likelier than the one before it, not than the first
    ],
)
def test_a_sample_that_could_be_kept_without_the_one_before_it_is_refused(
    confidence: tuple[float, ...], dropped: bool
) -> None:
    """What is sampled after a sibling is verified on the supposition that it came first."""
    guarded = GuardedDrafter(Samples(*confidence), 4)
    guarded.begin([0])
    assert len(guarded.propose(0, Budget(2, 4))) == (1 if dropped else 1 + len(confidence))
    assert (guarded.fault is not None) == dropped


@pytest.mark.parametrize("branches", [True, False])
def test_sampled_rows_that_branch_where_they_must_not_drop_the_drafter(branches: bool) -> None:
    """One that does so for some tokens only would choose the rule that verifies them."""
    guarded = GuardedDrafter(Samples(0.5, 0.5), 4)
    guarded.begin([0])
    assert len(guarded.propose(0, Budget(2, 3, branches=branches))) == (3 if branches else 1)
    assert (guarded.fault is None) == branches


class BrokenInPassing(SuffixDrafter):
    """Fails where it is asked nothing about the text."""

    anticipates = property(lambda self: raises(None))
    was_ready = property(lambda self: raises(None))

    sibling_acceptance = property(lambda self: raises(None))

    def state(self, learnt_only: bool = False) -> Any:
        raises(None)

    def load(self, state: Any, learnt_only: bool = False) -> None:
        raises(None)

    def attach(self, model: Any, session: Any) -> None:
        raises(None)

    def anticipate(self, stopped: Any) -> None:
        raises(None)


@pytest.mark.parametrize(
    ("ask", "otherwise"),
    [
        (lambda each: each.state(), {}),
        (lambda each: each.state(learnt_only=True), {}),
        (lambda each: each.load({"a": np.zeros(1)}), None),
        (lambda each: each.sibling_acceptance, ()),
        (lambda each: each.attach(None, None), None),
        (lambda each: each.prepare(PROMPT), None),
    ],
)
def test_a_drafter_may_fail_in_whatever_it_is_asked(ask: Any, otherwise: Any) -> None:
    guarded = GuardedDrafter(BrokenInPassing(), VOCAB)
    assert ask(guarded) == otherwise
    assert guarded.fault is not None
    guarded.begin(PROMPT)
    assert len(guarded.propose(1, Budget(3, 4))) == 1


def test_what_a_snapshot_does_not_fit_is_told(monkeypatch: Any) -> None:
    guarded = GuardedDrafter(BrokenInPassing(), VOCAB)

    def refuses(drafter: Any, state: Any, learnt_only: bool) -> None:
        raise KeyError("text")

    monkeypatch.setattr(BrokenInPassing, "load", refuses)
    with pytest.raises(KeyError):
        guarded.load({"a": np.zeros(1)})
    assert guarded.fault is None

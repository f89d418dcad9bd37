"""Verification of sampled draft tokens in all its outcomes: the text has exactly the target's
distribution, whatever was drafted.

Nothing is drawn here (tests/fixtures/sampled_outcomes.py): probabilities agree but for rounding.
That the sampler's own random numbers are as independent as this assumes is tested in
test_sampled_distribution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edge_spec.core import sampling
from edge_spec.core.model import Forward
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import Siblings, TokenTree, Verdict, chain_first, likeliest
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.scheduler.policy import FixedPolicy
from fixtures import sampled_outcomes as sampled
from fixtures import text_distribution as text
from fixtures.axes import each, pairwise_first

Context = tuple[int, ...]

WITHOUT, WITH = Siblings.WITHOUT_REPLACEMENT, Siblings.WITH_REPLACEMENT
ROUNDING = 1e-12  # of sums of up to some 100,000 products of float64 numbers below 1
TARGETS = {
    "0.5": SamplingParams(temperature=0.5, top_k=2),
    "1": SamplingParams(temperature=1.0),
    "1, nucleus": SamplingParams(temperature=1.0, top_p=0.8),
    "2": SamplingParams(temperature=2.0, top_k=2, top_p=0.97),
}


def error(case: Any, shape: Sequence[str], *, cut: Any = None, **form: Any) -> float:
    """The largest difference of a probability of the text from the target's."""
    expected = text.joint(case.scores.next_logits, sampled.PROMPT, case.params)
    draft = sampled.SampledDraft(case.draft_probs, shape, **form)
    return float(text.difference(case.texts(draft, cut=cut), expected))


DRAFTS = ("opposed", "smaller", "nucleus", "disjoint", "equal")
CHAINS = {
    "one": ("s",),
    "two": ("s", "s"),
    "three": ("s", "s", "s"),
    "four": ("s", "s", "s", "s"),
    "certain after": ("s", "s", "c", "c"),
    "certain before": ("c", "s", "s"),
    "certain between": ("s", "c", "s"),
}
SIBLINGS = {
    "two": ("ss",),
    "three": ("sss",),
    "all": ("ssss",),
    "two below each": ("ss", "ss"),
    "chains below": ("ss", "s", "s"),
    "above siblings": ("s", "s", "ss"),
    "certain first": ("cs",),
    "certain last": ("ssc", "c"),
    "certain between": ("scs",),
}


def drafts(params: SamplingParams, shape: Sequence[str]) -> list[str]:
    """Those that there can be, and for trees with very many outcomes the two that differ most."""
    if sum(map(len, shape)) > 3 and len(shape) > 1:
        return ["opposed", "smaller"]
    return [draft for draft in DRAFTS if draft != "disjoint" or params.top_k]


@pytest.fixture(autouse=True)
def remembered_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "target_probs", text.remembering(sampling.target_probs))


@pytest.mark.parametrize(("shape", "target"), each(list(CHAINS), list(TARGETS)))
def test_a_sampled_chain_leaves_the_text_its_distribution(shape: str, target: str) -> None:
    for name in drafts(TARGETS[target], CHAINS[shape]):
        case = sampled.Case(name, TARGETS[target], vocab=3)
        assert error(case, CHAINS[shape]) < ROUNDING, name


@pytest.mark.parametrize(
    ("shape", "target", "rule"), pairwise_first(list(SIBLINGS), list(TARGETS), list(Siblings))
)
def test_sampled_siblings_leave_the_text_its_distribution(
    shape: str, target: str, rule: Siblings
) -> None:
    rows = SIBLINGS[shape]
    for name in drafts(TARGETS[target], rows):
        case = sampled.Case(name, TARGETS[target], vocab=4 if len(rows) == 1 else 3)
        assert error(case, rows, siblings=rule) < ROUNDING, name


@pytest.mark.parametrize(
    ("stop", "shape"), each([0, 1, 2], [("s", "s", "s"), ("ss", "s", "s"), ("s", "s", "ss")])
)
def test_a_draft_may_stop_after_a_token_because_of_its_value(
    shape: tuple[str, ...], stop: int
) -> None:
    case = sampled.Case("opposed", SamplingParams(temperature=1.0), vocab=3)
    assert error(case, shape, grows=lambda path: path[-1] != stop) < ROUNDING


@pytest.mark.parametrize(
    ("rule", "shape"), each(list(Siblings), [("ss", "s"), ("s", "sc"), ("s", "s", "s")])
)
def test_penalties_count_the_draft_tokens_of_the_path(
    shape: tuple[str, ...], rule: Siblings
) -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.9)
    for name in ("opposed", "smaller"):
        case = sampled.Case(name, params, vocab=4 if rule is WITHOUT else 3)
        # Penalties are computed with float32 logits of about 1.
        assert error(case, shape, siblings=rule) < 1e-7


def by_depth(path: Context, place: int) -> float:
    return 0.8 ** len(path) / (1 + place)


def by_parent(path: Context, place: int) -> float:
    """Below great tokens it is so likely that a second child of another row has to go."""
    return (0.3 + 0.3 * path[-2] if len(path) > 1 else 0.6) / (1 + place)


def by_rival(path: Context, place: int) -> float:
    """Below token 0 it is so likely that a sibling of that one has to go."""
    if len(path) < 3:
        return (0.95, 0.95, 0.6)[len(path)] if place == 0 else 0.4
    return 0.9 if path[-2] == 0 else 0.1


BUDGET = Budget(10, 20)
# What policies do to a tree between drafting and verification.
CUTS: dict[str, Callable[[TokenTree], TokenTree]] = {
    "likeliest rows": lambda tree: likeliest(tree, 4),
    "likely rows": lambda tree: likeliest(tree, 20, 0.4),
    "first rows": lambda tree: tree.first_rows(3),
    "first of each": lambda tree: tree.select([0, 1, *tree.children(1)[:1]]),
    "fixed policy": lambda tree: FixedPolicy(3, 0.4).choose([Proposing(tree)], 0, BUDGET).tree,
}
CHAIN_CUTS = CUTS | {
    "chain first": lambda tree: chain_first(tree, 3),
    "likely chain": lambda tree: chain_first(tree, 20, 0.4),
    "policy of chains": lambda tree: (
        FixedPolicy(3, 0.4, branches=False).choose([Proposing(tree)], 0, BUDGET).tree
    ),
}


class Proposing(Drafter):
    """A drafter with one proposal."""

    name = "test"

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None: ...

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        return self._tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None: ...


@pytest.mark.parametrize(
    ("cut", "confidence"), pairwise_first(list(CHAIN_CUTS), [by_depth, by_parent])
)
def test_a_chain_may_be_cut_by_what_came_before(cut: str, confidence: Any) -> None:
    case = sampled.Case("opposed", SamplingParams(temperature=1.0), vocab=3)
    form = {"confidence": confidence, "cut": CHAIN_CUTS[cut]}
    assert error(case, ("s", "s", "s"), **form) < ROUNDING


@pytest.mark.parametrize(
    ("shape", "cut", "confidence", "rule"),
    pairwise_first(
        [("ss", "ss"), ("s", "ss", "s")],
        list(CUTS),
        [by_depth, by_parent, by_rival],
        [WITHOUT, WITH],
        # The one that shows a sample whose siblings were cut off and are forgotten.
        also=[(("s", "ss", "s"), "likely rows", by_rival, WITHOUT)],
    ),
)
def test_a_tree_may_be_cut_by_what_came_before(
    shape: tuple[str, ...], cut: str, confidence: Any, rule: Siblings
) -> None:
    case = sampled.Case("opposed", SamplingParams(temperature=1.0), vocab=3)
    form = {"siblings": rule, "confidence": confidence}
    assert error(case, shape, cut=CUTS[cut], **form) < ROUNDING


@pytest.mark.parametrize(
    ("shape", "cut", "confidence"),
    pairwise_first(
        [("s", "s"), ("ss", "ss"), ("s", "ss", "s")],
        ["likeliest rows", "likely rows", "fixed policy"],
        [by_depth, by_parent, by_rival],
    ),
)
def test_a_tree_of_k_seq_is_cut_by_whole_groups(
    shape: tuple[str, ...], cut: str, confidence: Any
) -> None:
    case = sampled.Case("opposed", SamplingParams(temperature=1.0), vocab=3)
    form = {"siblings": Siblings.K_SEQ, "confidence": confidence}
    assert error(case, shape, cut=CUTS[cut], **form) < ROUNDING


@pytest.mark.parametrize("rule", Siblings)
@pytest.mark.parametrize("stop", [0, 1])
def test_a_tree_that_stops_because_of_a_value_may_be_cut(stop: int, rule: Siblings) -> None:
    """What then takes the place of the rows that are missing depends on that value."""
    case = sampled.Case("opposed", SamplingParams(temperature=1.0), vocab=3)
    form = {"siblings": rule, "confidence": by_depth, "grows": lambda path: path[-1] != stop}
    assert error(case, ("s", "ss", "s"), cut=CUTS["likeliest rows"], **form) < ROUNDING

"""Sampled text has the target's distribution, whoever drafts; broken rules fail the same test.

The first LENGTH tokens are drawn many times with each drafter, and their joint frequencies are
compared with the exact probabilities by a chi-squared test. Draft tokens are opposed to the target:
the prompt, the corpus and the cache continue with what it likes least.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core import sampling
from edge_spec.core.model import Forward
from edge_spec.core.rng import Draws, exponential
from edge_spec.core.sampling import Sampler, SamplingParams, TokenChoice
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.jacobi import JacobiDrafter, LookaheadDrafter, WindowSize
from edge_spec.drafters.lookup.answers import AnswersDrafter, CorpusDrafter, KeptAnswers
from edge_spec.drafters.lookup.corpus_index import index_of
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.testing import ScriptedModel, random_logits
from edge_spec.text.vocabulary import Vocabulary
from fixtures import text_distribution as text
from fixtures.axes import each

Rule = Callable[[TokenTree, Forward, Sampler], Verdict]
Context = tuple[int, ...]

_choose = Sampler.choose
NUMBERS = 40  # for each draw: a right rule needs one a position


LENGTH, DRAWS, SMALLEST_P = text.LENGTH, text.DRAWS, text.SMALLEST_P


def opposed_text(model: ScriptedModel, length: int) -> list[int]:
    """What the target would never write: each token its least likely one, with a few of the
    second least so that the text branches."""
    text = [1, 0]
    while len(text) < length:
        order = np.argsort(model.next_logits(tuple(text)))
        text.append(int(order[int(len(text) % 3 == 0)]))
    return text


class OpposedDrafter(Drafter):
    """Drafts against the target: at each depth its least likely token, below which the tree
    goes on; with branching also the second least likely and the likeliest, each with children."""

    name = "opposed"

    def __init__(self, model: ScriptedModel, branching: bool) -> None:
        self._model = model
        self._branching = branching
        self._text: Context = ()

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self._text = tuple(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        tokens, parents = [pending], [-1]

        def grow(row: int, context: Context, depth: int) -> None:
            order = np.argsort(self._model.next_logits(context)).tolist()
            below = []
            for token in (order[0], order[1], order[-1]) if self._branching else order[:1]:
                tokens.append(token)
                parents.append(row)
                below.append((len(tokens) - 1, (*context, token)))
            for child, longer in below if depth < LENGTH - 1 else ():
                grow(child, longer, depth + 1)

        grow(0, self._text, 1)
        return TokenTree(np.array(tokens), np.array(parents), np.ones(len(tokens)))

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._text += verdict.tokens


def drafters(model: ScriptedModel, opposed: list[int], folder: Path) -> dict[str, Drafter]:
    """Every drafter, knowing what the opposed text taught it."""
    vocab_size = model.config.vocab_size
    vocabulary = Vocabulary.of({str(token): token for token in range(vocab_size)})
    kept = KeptAnswers(folder / "answers.json", vocabulary, keeps=False)
    kept.add(opposed, 0)
    # A draft whose favourites are the target's least likely tokens.
    draft = ScriptedModel(lambda tokens: -model.next_logits(tokens), vocab_size)
    return {
        "opposed": OpposedDrafter(model, branching=False),
        "opposed-tree": OpposedDrafter(model, branching=True),
        "suffix": SuffixDrafter(),
        "recycling": RecyclingDrafter(),
        "jacobi": JacobiDrafter(),
        "lookahead": LookaheadDrafter(WindowSize(2, 3, 3)),
        "corpus": CorpusDrafter([index_of([opposed], vocab_size)]),
        "answers": AnswersDrafter(kept),
        "draft-model": DraftModelDrafter(draft, draft.open_session(), vocab_size),
        "composite": CompositeDrafter([SuffixDrafter(), RecyclingDrafter(), LookaheadDrafter()]),
    }


class GivenDraws:
    """Stands for `sampling.Draws`: one random number a position, from an array."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers  # [draws, positions] uint64
        self._choices: dict[tuple[int, bytes], list[TokenChoice]] = {}
        self.draw = 0  # whose numbers are given

    def at(self, position: int) -> int:
        return int(self._numbers[self.draw, position])

    def choice(self, logits: np.ndarray, params: SamplingParams, position: int) -> TokenChoice:
        """What `Sampler.choose` takes; found for all draws at once."""
        key = position, logits.tobytes()
        if key not in self._choices:
            tokens, probabilities = sampling._kept(logits, params)
            finish = exponential(self._numbers[:, position, None], tokens)
            choices = [TokenChoice(token, near_tie=False) for token in tokens.tolist()]
            first = (finish / probabilities).argmin(1).tolist()
            self._choices[key] = [choices[i] for i in first]
        return self._choices[key][self.draw]


class SeededDraws:
    """The sampler's own numbers, a seed for each draw."""

    def __init__(self, draws: int) -> None:
        self._draws = [Draws(seed) for seed in range(draws)]
        self.draw = 0

    def at(self, position: int) -> int:
        return self._draws[self.draw].at(position)


def simulate(
    model: ScriptedModel,
    drafter: Drafter,
    prompt: Context,
    params: Any,
    rule: Rule,
    draws: int,
    numbers: Any,
) -> dict[Context, int]:
    """How often each run of LENGTH tokens was drawn.

    All draws share their rounds as long as they wrote the same text: a drafter's state is copied
    where they part. Verification runs for each of them.
    """
    sampler: Any = Sampler(SamplingParams(**params), prompt)
    sampler._draws = numbers
    drafter.begin(prompt)
    waiting: list[tuple[Drafter, Context, Any]] = [(drafter, (), range(draws))]
    counts: dict[Context, int] = {}
    while waiting:
        drafter, run, group = waiting.pop()
        if len(run) >= LENGTH:
            counts[run[:LENGTH]] = counts.get(run[:LENGTH], 0) + len(group)
            continue
        text = (*prompt, *run)
        session = model.open_session()
        session.prefill(text[:-1])
        tree = drafter.propose(text[-1], Budget(LENGTH + 1, 40))
        out = session.forward(tree)
        sampler.num_chosen = len(run)
        parts: defaultdict[Verdict, list[int]] = defaultdict(list)
        for numbers.draw in group:
            parts[rule(tree, out, sampler)].append(numbers.draw)
        for verdict, part in parts.items():
            own = copy.deepcopy(drafter, _shared(drafter))
            own.observe(tree, out, verdict)
            waiting.append((own, (*run, *verdict.tokens), part))
    return counts


def _shared(drafter: Any) -> dict[int, Any]:
    """What copies need not have of their own: models, mapped files."""
    parts = [getattr(drafter, name, None) for name in ("_model", "_indexes", "_answers")]
    return {id(part): part for part in parts if part is not None}


def p_value(
    model: ScriptedModel,
    drafter: Drafter,
    prompt: Context,
    params: Any,
    rule: Rule = verify,
    draws: int = DRAWS,
    numbers: Any = None,
) -> float:
    """Of the chi-squared test; a run that cannot be gives 0."""
    numbers = numbers or GivenDraws(
        np.random.default_rng(20).integers(0, 2**64, (draws, NUMBERS), np.uint64)
    )
    counts = simulate(model, drafter, prompt, params, rule, draws, numbers)
    return float(
        text.p_value(counts, text.joint(model.next_logits, prompt, SamplingParams(**params)))
    )


@pytest.fixture(autouse=True)
def raced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same few rows are verified 200,000 times: given numbers race all at once."""

    def choose(sampler: Any, logits: np.ndarray, path: Sequence[int]) -> TokenChoice:
        draws = sampler._draws
        if isinstance(draws, GivenDraws):
            return draws.choice(logits, sampler.params, sampler.num_chosen + len(path))
        return _choose(sampler, logits, path)

    monkeypatch.setattr(Sampler, "choose", choose)


def test_races_that_are_run_at_once_have_the_samplers_winners() -> None:
    params = SamplingParams(temperature=0.7, top_k=5)
    sampler: Any = Sampler(params, [])
    sampler._draws = numbers = GivenDraws(np.random.default_rng(3).integers(0, 2**63, (500, 4)))
    logits = np.random.default_rng(4).normal(0, 1, 8).astype(np.float32)
    for numbers.draw in range(500):
        for sampler.num_chosen in range(2):
            position = sampler.num_chosen + 2
            assert numbers.choice(logits, params, position) == _choose(sampler, logits, [0, 0])


NAMES = ("opposed", "opposed-tree", "suffix", "recycling", "jacobi", "lookahead", "corpus")
NAMES += ("answers", "draft-model", "composite")


@pytest.mark.parametrize("draws", [DRAWS // 20, pytest.param(DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "at"), each(NAMES, range(len(text.PARAMS))))
def test_the_first_tokens_have_the_targets_joint_distribution(
    name: str, at: int, draws: int, tmp_path: Path
) -> None:
    """A twentieth of the draws shows broken rules; all of them show a shift of 1 % of the mass."""
    vocab, params = text.PARAMS[at]
    model = ScriptedModel(random_logits(vocab, order=3, scale=1.0), vocab)
    prompt = opposed_text(model, 24)
    made = drafters(model, prompt, tmp_path)
    assert made.keys() == set(NAMES)
    assert p_value(model, made[name], tuple(prompt), params, draws=draws) > SMALLEST_P


def test_the_samplers_own_numbers_make_the_same_distribution() -> None:
    model = ScriptedModel(random_logits(6, order=3, scale=1.0), 6)
    drafter = OpposedDrafter(model, branching=True)
    draws = DRAWS // 20
    numbers = SeededDraws(draws)
    assert p_value(model, drafter, (1, 0), text.PARAMS[1][1], verify, draws, numbers) > SMALLEST_P


def likeliest_draft_token(
    tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler
) -> int | None:
    """Broken: a draft token that is the target's most probable token is always accepted."""
    best = int(logits[row].argmax())
    return best if best in tree.tokens[tree.children(row)] else None


def not_unlikely(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a token is dropped because of its value, here one with less than 10 %."""
    chosen = sampler.choose(logits[row], range(tree.depths[row])).token
    probabilities = text.exact_probs(logits[row], sampler.params)
    return int(logits[row].argmax()) if probabilities[chosen] < 0.1 else None


def second_draw(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: after a rejection the token is drawn from all tokens, the rejected ones included."""
    chosen = sampler.choose(logits[row], range(tree.depths[row])).token
    if chosen in tree.tokens[tree.children(row)]:
        return None
    return sampler.choose(logits[row], range(12 + tree.depths[row])).token


def shared_draw(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: every row of a round is chosen by the first row's random number."""
    return sampler.choose(logits[row], []).token


def second_chance(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a draft token that is listed twice is tried twice, each time with its full
    probability."""
    probabilities = text.exact_probs(logits[row], sampler.params)
    for attempt, candidate in enumerate(np.repeat(tree.tokens[tree.children(row)], 2).tolist()):
        draws: Any = sampler._draws
        if draws.at(12 + 8 * int(tree.depths[row]) + attempt) / 2**64 < probabilities[candidate]:
            return int(candidate)
    return None


BROKEN = [likeliest_draft_token, not_unlikely, second_draw, shared_draw, second_chance]


@pytest.mark.parametrize("meddle", BROKEN)
def test_broken_rules_fail_the_same_check(meddle: Any) -> None:
    def rule(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
        """`verify`, but where `meddle` names a token that one is chosen."""
        tokens: list[int] = []
        row: int | None = 0
        while row is not None:
            token = meddle(tree, out.logits, row, sampler)
            if token is None:
                token = sampler.choose(out.logits[row], tokens).token
            tokens.append(token)
            row = tree.child(row, token)
        return Verdict(tuple(tokens), (), exhausted=False)

    model = ScriptedModel(random_logits(6, order=3, scale=1.0), 6)
    drafter = OpposedDrafter(model, branching=True)
    # A twentieth of the draws is enough.
    assert p_value(model, drafter, (1, 0), text.PARAMS[1][1], rule, DRAWS // 20) < SMALLEST_P


def test_the_exact_distribution_sums_to_one_and_is_the_one_of_single_steps() -> None:
    model = ScriptedModel(random_logits(4, order=3, scale=1.0), 4)
    params = SamplingParams(temperature=1, top_p=0.9)
    runs = text.joint(model.next_logits, (1, 0), params)
    assert sum(runs.values()) == pytest.approx(1)
    for run in itertools.islice(runs, 10):
        steps = [
            text.exact_probs(model.next_logits((1, 0, *run[:i])), params)[run[i]] for i in range(3)
        ]
        assert runs[run] == pytest.approx(math.prod(steps))

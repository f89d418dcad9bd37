"""Sampled text has the target's distribution, whoever drafts; broken rules fail the same test.

The first LENGTH tokens are drawn many times with each drafter, and their joint frequencies are
compared with the exact probabilities by a chi-squared test. Guesses are opposed to the target:
the prompt, the corpus and the cache continue with what it likes least.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from edge_spec import sampling
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.corpus import CorpusDrafter
from edge_spec.drafters.corpus_file import build_index, open_index
from edge_spec.drafters.draft_model import DraftModelDrafter
from edge_spec.drafters.jacobi import JacobiDrafter
from edge_spec.drafters.lookahead import LookaheadDrafter, WindowSize
from edge_spec.drafters.ngram_cache import NgramCacheDrafter
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.recycling import RecyclingDrafter
from edge_spec.drafters.suffix import SuffixDrafter
from edge_spec.model import Forward
from edge_spec.sampling import Draws, Sampler, SamplingParams
from edge_spec.testing import ScriptedModel, random_logits
from edge_spec.tree import TokenTree, Verdict
from edge_spec.verify import verify
from edge_spec.vocabulary import Vocabulary

Rule = Callable[[TokenTree, Forward, Sampler], Verdict]
Context = tuple[int, ...]

LENGTH = 3
DRAWS = 200_000
NUMBERS = 40  # for each draw: a right rule needs one a position
# Under a right rule p-values are uniform, so each of the 30 tests here would fail with a chance
# of 1e-6 for a fresh choice of seeds: 3e-5 in all. Seeds are fixed, so a test that passed passes
# for ever. On the other side, a shift of 1 % of the mass between two tokens of probability 1/8
# adds 200,000 * (0.01^2 / 0.125) * 2 = 320 to the statistic, whose standard deviation is about
# sqrt(2 * 511) = 32 for 8^3 runs: p below 1e-12.
SMALLEST_P = 1e-6
PARAMS = (
    (8, {"temperature": 0.5, "top_p": 0.95, "top_k": 6}),
    (6, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}),
    (4, {"temperature": 2.0, "top_p": 0.97, "top_k": 3}),
)


def exact_probs(logits: np.ndarray, params: SamplingParams) -> list[float]:
    """Temperature, top-k and top-p by definition; logits are distinct."""
    weights = [math.exp(float(logit) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: params.top_k] if params.top_k else order
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if mass < params.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(weights))]


def joint(model: ScriptedModel, prompt: Context, params: SamplingParams) -> dict[Context, float]:
    """Exact probability of every possible run of the first LENGTH tokens."""
    runs = {(): 1.0}
    for _ in range(LENGTH):
        runs = {
            (*run, token): mass * probability
            for run, mass in runs.items()
            for token, probability in enumerate(
                exact_probs(model.next_logits((*prompt, *run)), params)
            )
            if probability > 0
        }
    return runs


def opposed_text(model: ScriptedModel, length: int) -> list[int]:
    """What the target would never write: each token its least likely one, with a few of the
    second least so that the text branches."""
    text = [1, 0]
    while len(text) < length:
        order = np.argsort(model.next_logits(tuple(text)))
        text.append(int(order[int(len(text) % 3 == 0)]))
    return text


class OpposedDrafter:
    """Guesses against the target: at each depth its least likely token, below which the tree goes
    on; with branching also the second least likely and the likeliest, each with children."""

    name = "opposed"

    def __init__(self, model: ScriptedModel, branching: bool) -> None:
        self._model = model
        self._branching = branching
        self._text: Context = ()

    def begin(self, prompt: Sequence[int]) -> None:
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
    build_index([opposed], vocabulary, folder / "opposed.corpus")
    cache = NgramCacheDrafter(folder / "opposed.ngrams", vocabulary.sha256, vocab_size)
    cache.begin(opposed[:1])
    cache.observe(TokenTree.chain(0), Forward(np.zeros((1, 1))), Verdict(tuple(opposed), (), True))
    # A draft whose favourites are the target's least likely tokens.
    draft = ScriptedModel(lambda tokens: -model.next_logits(tokens), vocab_size)
    return {
        "opposed": OpposedDrafter(model, branching=False),
        "opposed-tree": OpposedDrafter(model, branching=True),
        "suffix": SuffixDrafter(),
        "recycling": RecyclingDrafter(),
        "jacobi": JacobiDrafter(),
        "lookahead": LookaheadDrafter(WindowSize(2, 3, 3)),
        "corpus": CorpusDrafter([open_index(folder / "opposed.corpus", vocabulary)]),
        "ngram-cache": cache,
        "draft-model": DraftModelDrafter(draft, draft.open_session(), vocab_size),
        "composite": CompositeDrafter([SuffixDrafter(), RecyclingDrafter(), LookaheadDrafter()]),
    }


class GivenDraws:
    """Stands for `sampling.Draws`: one random number a position, from an array."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers: list[list[int]] = numbers.tolist()
        self.draw = 0  # whose numbers are given

    def at(self, position: int) -> int:
        return self._numbers[self.draw][position]


def random_numbers(draws: int) -> np.ndarray:
    """[draws, NUMBERS] uint64."""
    return np.random.default_rng(20).integers(0, 2**64, (draws, NUMBERS), np.uint64)


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
    parts = [getattr(drafter, name, None) for name in ("_model", "_indexes", "_store")]
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
    numbers = numbers or GivenDraws(random_numbers(draws))
    counts = simulate(model, drafter, prompt, params, rule, draws, numbers)
    expected = joint(model, prompt, SamplingParams(**params))
    if counts.keys() - expected.keys():
        return 0.0
    # The chi-squared approximation wants 5 expected draws a cell: rarer runs share one.
    common = [run for run, mass in expected.items() if mass * draws >= 5]
    observed = [counts.get(run, 0) for run in common]
    masses = [expected[run] * draws for run in common]
    if len(common) < len(expected):
        observed.append(draws - sum(observed))
        masses.append(draws - sum(masses))
    return float(chisquare(observed, masses).pvalue)


@pytest.fixture(autouse=True)
def remembered_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same few rows are verified 200,000 times: their probabilities are computed once."""

    @lru_cache(maxsize=4096)
    def remembered(row: bytes, params: Any) -> np.ndarray:
        return original(np.frombuffer(row, np.float32), SamplingParams(*params))

    def target_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
        key = (params.temperature, params.top_k, params.top_p, params.min_p)
        return remembered(logits.tobytes(), key)

    original = sampling.target_probs
    monkeypatch.setattr(sampling, "target_probs", target_probs)


NAMES = ("opposed", "opposed-tree", "suffix", "recycling", "jacobi", "lookahead", "corpus")
NAMES += ("ngram-cache", "draft-model", "composite")


@pytest.mark.parametrize(("vocab", "params"), PARAMS, ids=["0.5", "1", "2"])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_tokens_have_the_targets_joint_distribution(
    name: str, vocab: int, params: dict[str, float], tmp_path: Path
) -> None:
    model = ScriptedModel(random_logits(vocab, order=3, scale=1.0), vocab)
    prompt = opposed_text(model, 24)
    made = drafters(model, prompt, tmp_path)
    assert made.keys() == set(NAMES)
    assert p_value(model, made[name], tuple(prompt), params) > SMALLEST_P


def test_the_samplers_own_numbers_make_the_same_distribution() -> None:
    model = ScriptedModel(random_logits(6, order=3, scale=1.0), 6)
    drafter = OpposedDrafter(model, branching=True)
    draws = DRAWS // 20
    numbers = SeededDraws(draws)
    assert p_value(model, drafter, (1, 0), PARAMS[1][1], verify, draws, numbers) > SMALLEST_P


def likeliest_guess(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a guess that is the target's most probable token is always accepted."""
    best = int(logits[row].argmax())
    return best if best in tree.tokens[tree.children(row)] else None


def not_unlikely(tree: TokenTree, logits: np.ndarray, row: int, sampler: Sampler) -> int | None:
    """Broken: a token is dropped because of its value, here one with less than 10 %."""
    chosen = sampler.choose(logits[row], range(tree.depths[row])).token
    probabilities = exact_probs(logits[row], sampler.params)
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
    """Broken: a guess that is listed twice is tried twice, each time with its full probability."""
    probabilities = exact_probs(logits[row], sampler.params)
    for attempt, guess in enumerate(np.repeat(tree.tokens[tree.children(row)], 2).tolist()):
        draws: Any = sampler._draws
        if draws.at(12 + 8 * int(tree.depths[row]) + attempt) / 2**64 < probabilities[guess]:
            return int(guess)
    return None


BROKEN = [likeliest_guess, not_unlikely, second_draw, shared_draw, second_chance]


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
    assert p_value(model, drafter, (1, 0), PARAMS[1][1], rule, DRAWS // 20) < SMALLEST_P


def test_the_exact_distribution_sums_to_one_and_is_the_one_of_single_steps() -> None:
    model = ScriptedModel(random_logits(4, order=3, scale=1.0), 4)
    params = SamplingParams(temperature=1, top_p=0.9)
    runs = joint(model, (1, 0), params)
    assert sum(runs.values()) == pytest.approx(1)
    for run in itertools.islice(runs, 10):
        steps = [exact_probs(model.next_logits((1, 0, *run[:i])), params)[run[i]] for i in range(3)]
        assert runs[run] == pytest.approx(math.prod(steps))

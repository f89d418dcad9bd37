"""`edge-spec verify` passes right rules and fails broken ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from edge_spec.cli.output import page_lines
from edge_spec.core.model import Forward
from edge_spec.core.modes import LosslessMode
from edge_spec.core.rng import Purpose
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.lossless_check.prove import (
    Difference,
    Proof,
    checks,
    document,
    page,
    prove,
)
from edge_spec.diagnostics.lossless_check.sampling import check_sampling
from edge_spec.drafters.draft.draft_model import Draft
from edge_spec.engine.engine import Engine
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.testing import ScriptedModel, ScriptedSession
from edge_spec.text.prompt_files import Prompt
from fixtures.silence import quiet

VOCAB, EOS = 260, 258  # of the byte tokenizer
PROMPTS = [Prompt(f"p{i}", "any", "red green blue " * (3 + i)) for i in range(4)]
SMALL = Extent(count=4, max_tokens=24, draws=400)


def followed(text: bytes) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for before, after in itertools.pairwise(text):
        found.setdefault(before, set()).add(after)
    return found


def wordy(seed: int = 0) -> ScriptedModel:
    """Likes to go on as the colours do, so that drafts out of the prompt are often right."""
    scores = np.random.default_rng(seed).normal(0, 0.5, (VOCAB, VOCAB)).astype(np.float32)
    after = followed(b"red green blue red blue green red")
    for token in range(VOCAB):
        scores[token, sorted(after.get(token, b" "))] += 6
    scores[:, EOS] -= 20
    return ScriptedModel(lambda tokens: scores[tokens[-1]].copy(), VOCAB)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws without a seed are the same in every run of this test."""
    monkeypatch.setattr("edge_spec.core.sampling.secrets.randbits", Random(0).getrandbits)


@pytest.fixture
def with_drafter(make_engine: Any) -> Any:
    def make(
        names: str, model: ScriptedModel | None = None, draft: ScriptedModel | None = None
    ) -> Engine:
        parts = make_engine(model or wordy()).parts
        drafts = [Draft(draft or wordy(seed=1), VOCAB)]
        setting = replace(parts.speculation_factory.setting, drafts=drafts)
        speculation_factory = replace(parts.speculation_factory, setting=setting)
        return Engine(
            replace(
                parts,
                drafter=names,
                drafts=drafts,
                speculation_factory=speculation_factory,
                speculation=speculation_factory.choose(names),
            )
        )

    return make


@pytest.mark.parametrize("names", ["suffix", "draft-model", "suffix,draft-model", "recycling"])
def test_right_rules_pass(with_drafter: Any, names: str) -> None:
    engine = with_drafter(names)
    proof = prove(engine, PROMPTS, SMALL, quiet)
    assert proof.passed and not proof.differing
    assert proof.seeded is not None and proof.sampling is not None
    assert proof.greedy.num_prompts == 4 and proof.seeded.num_prompts == 2
    for origin in ("accepted", "recovered"):  # else the draws say little
        assert proof.sampling.origins[origin] >= 100, proof.sampling.origins
    assert proof.sampling.fit.num_cells > 6
    assert engine.drafter == names
    assert engine.chat("red green blue red green", max_tokens=12).stats.draft_n > 0


def accepts_any(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
    """Broken: the first draft token is taken as it is."""
    verdict = verify(tree, out, sampler)
    if tree.children(0) and not verdict.accepted_rows:
        row = tree.children(0)[0]
        candidate = int(tree.tokens[row])
        after = sampler.choose(out.logits[row], [candidate])
        return Verdict((candidate, after.token), (row,), True)
    return verdict


def accepts_the_likely(tree: TokenTree, out: Forward, sampler: Sampler) -> Verdict:
    """Broken where it samples: a draft token that is likely enough is taken (typical
    acceptance)."""
    if sampler.params.greedy or not tree.children(0):
        return verify(tree, out, sampler)
    row = tree.children(0)[0]
    if sampler.probs(out.logits[0], ())[tree.tokens[row]] < 0.05:
        return verify(tree, out, sampler)
    candidate = int(tree.tokens[row])
    return Verdict((candidate, sampler.choose(out.logits[row], [candidate]).token), (row,), True)


def test_a_broken_rule_fails_greedy_text(
    with_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_drafter("suffix")
    monkeypatch.setattr("edge_spec.engine.decoder.verify", accepts_any)
    proof = prove(engine, PROMPTS, replace(SMALL, draws=0), quiet)
    assert not proof.passed and not proof.greedy.passed and proof.seeded is proof.sampling is None
    for difference in proof.greedy.differing:
        assert difference.margin is not None and difference.margin > 0
        assert not difference.near_tie and difference.expected != difference.got


def test_a_rule_that_is_broken_where_it_samples_fails_there(
    with_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_drafter("suffix")
    monkeypatch.setattr("edge_spec.engine.decoder.verify", accepts_the_likely)
    proof = prove(engine, PROMPTS, SMALL, quiet)
    assert proof.greedy.passed and not proof.passed
    assert proof.seeded is not None and not proof.seeded.passed
    assert proof.sampling is not None and not proof.sampling.passed


def recovers_from_the_target(
    tree: TokenTree, chain: Sequence[int], out: Forward, sampler: Sampler, path: Sequence[int]
) -> tuple[list[int], int | None]:
    """Broken: what is written in the place of a wrong sample may be the sample again."""
    kept: list[int] = []
    for row in chain:
        before = [*path, *tree.tokens[kept].tolist()]
        target = sampler.probs(out.logits[tree.parents[row]], before)
        candidate, draft = tree.tokens[row], tree.draft_probs[row]
        assert draft is not None
        if sampler.uniform(Purpose.ACCEPTANCE) * draft[candidate] >= target[candidate]:
            return kept, sampler.draw(target, Purpose.RECOVERY)
        kept.append(row)
    return kept, None


def test_a_broken_rule_of_sampled_drafts_fails_the_distribution(
    with_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = check_sampling(with_drafter("draft-model"), 600, 0.0, quiet)
    monkeypatch.setattr("edge_spec.core.verify.walk.verify_block", recovers_from_the_target)
    broken = check_sampling(with_drafter("draft-model"), 600, 0.0, quiet)
    assert right.passed is True and broken.passed is False
    assert broken.fit.num_impossible == 0  # these texts may be drawn, but not as often


@pytest.mark.parametrize("noise", [1e-4, 0.01, 0.05, 0.2, 0.4, 0.75])
def test_no_noise_lets_a_broken_rule_pass(
    with_drafter: Any, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """It may leave open whether the rule is broken: then nothing is claimed."""
    monkeypatch.setattr("edge_spec.core.verify.walk.verify_block", recovers_from_the_target)
    broken = check_sampling(with_drafter("draft-model"), 600, noise, quiet)
    assert broken.passed is False or (broken.passed is None and noise >= 0.01)


def wrong(tokens: tuple[int, ...]) -> np.ndarray:
    """Likes what the target never writes."""
    logits: np.ndarray = -4 * LIKED(tokens)
    return logits


# The draft, the draft tokens that the texts have to have verified, and what is missing.
@pytest.mark.parametrize(
    ("draft", "drafts", "missing"),
    [
        (ScriptedModel(wrong, VOCAB), True, "0 of at least 5 draft tokens were accepted"),
        (None, True, "0 of at least 5 draft tokens were rejected"),  # the target itself
        (ScriptedModel(wrong, VOCAB, context_length=4), False, "accepted and 0 of at least 5"),
    ],
    ids=["never right", "always right", "never asked"],
)
def test_what_was_not_exercised_passes_nothing(
    with_drafter: Any, draft: ScriptedModel | None, drafts: bool, missing: str
) -> None:
    target = wordy()
    target.capabilities = replace(target.capabilities, trees=False)
    engine = with_drafter("draft-model", target, draft or target)
    proof = prove(engine, PROMPTS, replace(SMALL, draws=200), quiet)
    assert proof.seeded is not None and proof.sampling is not None
    assert bool(proof.greedy.num_guesses) == drafts and not proof.differing
    assert proof.greedy.passed is proof.sampling.passed is None
    assert proof.passed is None
    report = document(proof, "cpu")
    assert report["verdict"] == "inconclusive"
    marks = {name: mark for name, mark, _ in checks(proof)}
    assert {marks[each] for each in ("greedy text", "distribution")} == {"inconclusive"}
    text = " ".join(printed(proof).split())
    assert missing in text and "INCONCLUSIVE" in text and "PASS" not in text
    assert "Raise --count and --max-tokens, or name a --drafter" in text
    failed = replace(proof, greedy=replace(proof.greedy, differing=(FAR,)))
    assert failed.passed is False


def test_branches_and_conversations_are_named_where_nothing_tried_them(with_drafter: Any) -> None:
    model = wordy()
    model.capabilities = replace(model.capabilities, trees=False)
    chains = prove(with_drafter("recycling", model), PROMPTS, SMALL, quiet)
    alone = "several conversations at once: one was answered at a time"
    assert chains.not_exercised == ("branches: no verified draft tokens branched", alone)
    branching = prove(with_drafter("recycling"), PROMPTS, replace(SMALL, draws=0), quiet)
    assert branching.greedy.num_branching > 0
    left_out = "sampled text and its distribution: nothing was sampled with drafts"
    assert branching.not_exercised == (left_out, alone)
    shown = printed(branching)
    assert f"not exercised: {left_out}" in " ".join(shown.split())


FAR = Difference("p", 0, "a", "b", margin=1.0, near_tie=False)


class NoisySession(ScriptedSession):
    """A row that is scored alone has slightly other logits."""

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        if len(tree) == 1:
            wobble = np.random.default_rng(self.length).uniform(-0.05, 0.05, logits.shape)
            logits += wobble.astype(np.float32)
        return Forward(logits)


class NoisyModel(ScriptedModel):
    def open_session(self) -> NoisySession:
        return NoisySession(self)


LIKED = wordy().next_logits


def tied(tokens: tuple[int, ...]) -> np.ndarray:
    """Goes on as the colours do, and what comes first is often a matter of 0.03 of a logit."""
    logits = LIKED(tokens)
    best = int(logits.argmax())
    logits[(best + 1) % 256] = logits[best] - 0.03
    return logits


class WrongSession(ScriptedSession):
    """Several rows at once are scored wrongly: 3 of a logit for what is next to the likeliest."""

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        if len(tree) > 1:
            rows = np.arange(len(tree))
            logits[rows, (logits.argmax(axis=1) + 1) % 256] += 3
        return Forward(logits)


class WrongModel(ScriptedModel):
    def open_session(self) -> WrongSession:
        return WrongSession(self)


def test_wide_passes_that_are_wrong_are_not_excused_by_their_own_noise(with_drafter: Any) -> None:
    def clear(tokens: tuple[int, ...]) -> np.ndarray:
        logits = LIKED(tokens)
        best = int(logits.argmax())
        logits[(best + 1) % 256] = logits[best] - 2
        return logits

    engine = with_drafter("recycling", WrongModel(clear, VOCAB))
    proof = prove(engine, PROMPTS, replace(SMALL, draws=0), quiet)
    assert {each.margin for each in proof.greedy.differing} == {2.0}
    assert proof.numerics.tie_margin > 2.0
    assert proof.passed is False


def test_near_ties_are_told_apart_from_faults(with_drafter: Any) -> None:
    extent = replace(SMALL, draws=200)
    proof = prove(with_drafter("recycling", NoisyModel(tied, VOCAB)), PROMPTS, extent, quiet)
    assert proof.greedy.differing and proof.passed
    assert 0 < proof.numerics.tie_margin <= 0.2
    for difference in proof.differing:
        assert difference.near_tie and difference.margin is not None
        assert difference.margin <= proof.numerics.tie_margin
    assert proof.verdict == "ties" and printed(proof).splitlines()[2].startswith("NEAR TIES")


def test_a_near_tie_is_a_fault_where_texts_are_promised_to_be_bit_identical(
    with_drafter: Any,
) -> None:
    engine = with_drafter("recycling", NoisyModel(tied, VOCAB))
    promised = Losslessness(LosslessMode.AUTO, (1, 2, 4, 8))
    factory = replace(engine.parts.speculation_factory, lossless=promised)
    engine.parts = replace(engine.parts, speculation_factory=factory)
    proof = prove(engine, PROMPTS, SMALL, quiet)
    assert proof.greedy.differing and proof.passed is False
    shown = printed(proof)
    assert shown.splitlines()[2].startswith("FAIL") and "differ: fault" in shown


def printed(proof: Proof) -> str:
    return "\n".join(page_lines(page(proof)))


@pytest.fixture
def failed(with_drafter: Any, monkeypatch: pytest.MonkeyPatch) -> Proof:
    monkeypatch.setattr("edge_spec.engine.decoder.verify", accepts_any)
    return prove(with_drafter("suffix"), PROMPTS, replace(SMALL, draws=200), quiet)


def test_the_document_has_the_promised_fields(failed: Proof) -> None:
    report = json.loads(json.dumps(document(failed, "cpu"), allow_nan=False))
    names = ["verdict", "model", "runtime", "device", "drafter", "lossless", "greedy", "sampling"]
    assert {*names, "numerics", "machine", "versions"} <= set(report)
    assert report["verdict"] == "fail"
    greedy, sampling = report["greedy"], report["sampling"]
    assert {"num_prompts", "num_tokens", "num_differing_prompts", "near_ties"} <= set(greedy)
    assert set(greedy["differing"][0]) == {
        *("prompt", "token_index", "expected", "got", "margin", "near_tie")
    }
    tests = {"divergence", "num_cells", "p_value", "total_variation", "passed"}
    assert tests | {"num_draws", "num_tokens", "total_variation_bound"} <= set(sampling)
    assert {"invariant_widths", "tie_margin", "branch_invariant"} <= set(report["numerics"])


def test_what_a_model_wrote_is_no_command_of_the_terminal(failed: Proof) -> None:
    evil = "\x1b[31m[bold]"
    differing = tuple(replace(each, got=evil, prompt=evil) for each in failed.greedy.differing)
    greedy = replace(failed.greedy, differing=differing)
    text = printed(replace(failed, model=evil, greedy=greedy))
    assert "\x1b" not in text and "FAIL" in text and "fault" in text

"""A port of docs/mobile.md in plain Python, with nothing of edge_spec or numpy, meets the vectors.

So the page and docs/vectors say all that the author of another port has to know.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from math import exp, inf, log
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest

VECTORS = Path(__file__).parents[3] / "docs" / "vectors"
Probabilities = list[float]
Case = dict[str, Any]


def cases(name: str) -> Any:
    found = json.loads((VECTORS / f"{name}.json").read_text("utf-8"))["cases"]
    return pytest.mark.parametrize("case", found, ids=lambda case: case.get("name", "race"))


def float32(logits: Sequence[float]) -> list[float]:
    return [unpack("f", pack("f", logit))[0] for logit in logits]


def normalized(weights: Sequence[float]) -> Probabilities:
    mass = sum(weights)
    return [weight / mass for weight in weights] if mass > 0 else list(weights)


def probabilities(case: Case, logits: Sequence[float]) -> Probabilities:
    sampling = case["sampling"]
    scores = float32(logits)
    for token, bias in sampling.get("logit_bias", {}).items():
        scores[int(token)] += bias
    output = {*case.get("output", ()), *case.get("path", ())}
    penalty = sampling.get("repetition_penalty", 1.0)
    for token in output | set(case.get("prompt", ())):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in output:
        scores[token] -= sampling.get("presence_penalty", 0.0)
    if sampling["temperature"] == 0:
        return [float(token == scores.index(max(scores))) for token in range(len(scores))]
    if 0 < sampling.get("top_k", 0) < len(scores):
        least = sorted(scores)[-sampling["top_k"]]
        scores = [score if score >= least else -inf for score in scores]
    most = max(scores)
    probs = normalized([exp((score - most) / sampling["temperature"]) for score in scores])
    least = sampling.get("min_p", 0.0) * max(probs)
    if sampling.get("top_p", 1.0) < 1:
        mass = 0.0
        for probability in sorted(probs, reverse=True):
            mass += probability
            if mass >= sampling["top_p"] * (1 - 1e-12):
                least = max(least, probability)
                break
    return normalized([probability if probability >= least else 0.0 for probability in probs])


def exponential(key: int, token: int) -> float:
    wrap = (1 << 64) - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & wrap
    z = (z ^ z >> 31) >> 12
    return -log((z + 0.5) / 2**52)


def winner(key: int, probs: Probabilities) -> int:
    times = [exponential(key, i) / p if p > 0 else inf for i, p in enumerate(probs)]
    return times.index(min(times))


def drawn(weights: Sequence[float], number: float) -> int:
    total, mass = sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > number * total:
            return token
    raise AssertionError("the numbers of the vectors are far from 1")


class Round:
    """Verifies one tree."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self._draft_tokens = case["tree"]["tokens"]
        self._sampled_from = case["tree"].get("draft_probs", [None] * len(self._draft_tokens))
        self._keys = [int(key) for key in case["draws"]["position_keys"]]
        self._acceptance = iter(case["draws"]["acceptance"])
        self._recovery = iter(case["draws"]["recovery"])

    def children(self, row: int) -> list[int]:
        return [i for i, parent in enumerate(self.case["tree"]["parents"]) if parent == row]

    def target(self, row: int) -> Probabilities:
        return probabilities(self.case, self.case["logits"][row])

    def verify(self) -> None:
        row: int | None = 0
        while row is not None:
            children = self.children(row)
            if any(self._sampled_from[child] for child in children):
                row = self.chain(row) if len(children) == 1 else self.siblings(row, children)
                continue
            probs = self.target(row)
            if self.case["sampling"]["temperature"] == 0:
                token = probs.index(1.0)
            else:
                token = winner(self._keys[len(self.tokens)], probs)
            row = next((child for child in children if self._draft_tokens[child] == token), None)
            self.write(token, row)
        assert [*self._acceptance, *self._recovery] == []

    def write(self, token: int, row: int | None) -> None:
        self.tokens.append(token)
        if row is not None:
            self.accepted.append(row)

    def chain(self, row: int) -> int | None:
        rows, above = [], row
        while len(below := self.children(above)) == 1 and self._sampled_from[below[0]]:
            above = below[0]
            rows.append(above)
        weights, targets, numbers = [1.0], [], []
        for before, candidate in zip([row, *rows], rows, strict=False):
            p, q = self.target(before), self._sampled_from[candidate]
            token = self._draft_tokens[candidate]
            ratio = weights[-1] * p[token] / q[token] if q[token] else 0.0
            weights.append(min(1.0, ratio))
            targets.append((p, q))
            if not weights[-1]:
                break
        numbers = [next(self._acceptance) for _ in targets]
        if numbers[-1] < weights[-1]:
            for each in rows:
                self.write(self._draft_tokens[each], each)
            return rows[-1]
        for count in range(len(targets) - 1, -1, -1):
            p, q = targets[count]
            rest = [max(0.0, weights[count] * a - b) for a, b in zip(p, q, strict=True)]
            mass = sum(rest)
            if count == 0 or numbers[count - 1] * (mass + 1 - weights[count]) < mass:
                break
        for each in rows[:count]:
            self.write(self._draft_tokens[each], each)
        self.write(drawn(rest if mass else p, next(self._recovery)), None)
        return None

    def siblings(self, row: int, children: Sequence[int]) -> int | None:
        rest = self.target(row)
        q = next(probs for child in children if (probs := self._sampled_from[child]))
        for child in children:
            token = self._draft_tokens[child]
            sampled = self._sampled_from[child] is not None
            if sampled and q[token] == 0:
                continue
            if next(self._acceptance) * (q[token] if sampled else 1.0) < rest[token]:
                self.write(token, child)
                return child
            if sampled:
                rest = normalized([max(0.0, a - b) for a, b in zip(rest, q, strict=True)])
            else:
                rest = normalized([0.0 if i == token else a for i, a in enumerate(rest)])
            if sampled and self.case["tree"]["siblings"] == "without-replacement":
                q = normalized([0.0 if i == token else b for i, b in enumerate(q)])
        self.write(drawn(rest, next(self._recovery)), None)
        return None


@cases("sampling")
def test_probabilities(case: Case) -> None:
    assert probabilities(case, case["logits"]) == pytest.approx(case["target_probs"], rel=1e-6)


@cases("races")
def test_races(case: Case) -> None:
    numbers = [exponential(int(case["key"]), token) for token in range(len(case["logits"]))]
    assert numbers == pytest.approx(case["exponential"], rel=1e-12)
    assert winner(int(case["key"]), probabilities(case, case["logits"])) == case["token"]


@cases("verification")
def test_verdicts(case: Case) -> None:
    if case["tree"].get("siblings") == "k-seq":
        return  # the page leaves this rule to the paper
    verified = Round(case)
    verified.verify()
    assert verified.tokens == case["verdict"]["tokens"]
    assert verified.accepted == case["verdict"]["accepted_rows"]
    assert [0, *verified.accepted][: len(verified.tokens)] == case["verdict"]["kept"]


def followers(text: Sequence[int], end: Sequence[int]) -> list[int]:
    """What followed the longest end of `end` that occurs before the end of the text."""
    for length in range(len(end), 0, -1):
        found = [
            i + length
            for i in range(len(text) - length)
            if list(text[i : i + length]) == list(end[-length:])
        ]
        if found:
            counts = Counter(text[i] for i in found)
            latest = {text[i]: i for i in found}
            return sorted(counts, key=lambda token: (-counts[token], -latest[token]))
    return []


@cases("suffix")
def test_suffix_lookup(case: Case) -> None:
    chain: list[int] = []
    while len(chain) < case["most"]:
        found = followers(case["text"], [*case["text"], *chain])
        if not found:
            break
        chain.append(found[0])
    assert chain == case["chain"]

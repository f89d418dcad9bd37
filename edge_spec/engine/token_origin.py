"""Tells which tokens of a round were drafted, and by whom."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from edge_spec.core.logprobs import Score
from edge_spec.core.metrics import DraftCounts
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict


class Origin(StrEnum):
    """The way a token came about."""

    PLAIN = "plain"  # the round had no draft token
    ACCEPTED = "accepted"  # a draft token that the target confirmed
    RECOVERED = "recovered"  # the target's own choice after a wrong draft token
    BONUS = "bonus"  # the target's own choice after all draft tokens were right


class DecodedToken(NamedTuple):
    id: int
    origin: Origin
    drafter: str = ""  # whose draft token it was, several joined by "+", where it was accepted
    score: Score | None = None  # where the sampler scores tokens


def draft_counts(tree: TokenTree, verdict: Verdict) -> dict[str, DraftCounts]:
    counts: dict[str, DraftCounts] = {}
    for row, names in enumerate(tree.proposed_by[1:], start=1):
        for name in names.split("+"):
            drafted, accepted = counts.get(name, (0, 0))
            counts[name] = DraftCounts(drafted + 1, accepted + (row in verdict.accepted_rows))
    return counts


def decoded_tokens(
    tree: TokenTree, verdict: Verdict, out: Forward, sampler: Sampler
) -> list[DecodedToken]:
    """Returns each token with where it comes from, and how likely it was at the row it follows."""
    proposed_by = tree.proposed_by or ("",) * len(tree)
    decoded = []
    for i, (token, row) in enumerate(zip(verdict.tokens, verdict.kept, strict=True)):
        score = sampler.score(out.logits[row], token)
        if i < len(verdict.accepted_rows):
            drafter = proposed_by[verdict.accepted_rows[i]]
            decoded.append(DecodedToken(token, Origin.ACCEPTED, drafter, score))
            continue
        if len(tree) == 1:
            origin = Origin.PLAIN
        else:
            origin = Origin.BONUS if verdict.exhausted else Origin.RECOVERED
        decoded.append(DecodedToken(token, origin, score=score))
    return decoded

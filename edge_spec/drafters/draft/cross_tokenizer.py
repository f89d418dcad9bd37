"""A draft with another tokenizer drafts text, which the target's tokenizer makes tokens of.

Universal assisted generation (Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", string-level exact match; Hugging
Face's assisted generation across tokenizers). The tokens are deterministic candidates: the draft's
distribution is over other tokens, so nothing is known of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward
from edge_spec.core.text_codec import TextCodec
from edge_spec.core.tree import TokenTree, Verdict, chain_first
from edge_spec.drafters.acceptance import OutcomeRate
from edge_spec.drafters.draft.token_alignment import PartCodec, TokenAlignment, num_shared
from edge_spec.drafters.protocol import (
    Budget,
    Cost,
    Drafter,
    DrafterTraits,
    TextCounts,
    named,
    part_of,
)

# How often the last token of a draft token is right where all its text is, before anything is
# learnt of the two vocabularies. Measured for a target's of 49 thousand tokens and byte-level
# drafts, on the text that these were trained on: 0.99 with 30 and 8 thousand tokens, 0.9 with 2
# thousand, 0.6 with 500; on another model's text 0.5 to 0.9. Leaving that token out took 0 to 21 %
# more rounds.
_OPEN_END = 0.9
_PRIOR_WEIGHT = 12.0  # draft tokens that it counts for
_NO_SCORES = Forward(np.empty((0, 0), np.float32))


class _OpenEnds:
    """Learns what is left of the draft's confidence in the last token that it drafts, which what
    follows may join: the draft token "inter" is one token, and so is "interest"."""

    def __init__(self) -> None:
        self._rate = OutcomeRate(_OPEN_END, _PRIOR_WEIGHT)

    @property
    def factor(self) -> float:
        return min(1.0, self._rate.right / self._rate.seen)

    def observe(self, confidence: float, right: bool) -> None:
        self._rate.observe(right, seen=confidence)

    def snapshot(self) -> np.ndarray:
        """[2] float64: how many were expected to be right, and how many were."""
        return np.array([self._rate.seen, self._rate.right])

    def restore(self, counts: np.ndarray) -> None:
        """Raises ValueError for what are no such counts."""
        if (
            counts.shape != (2,)
            or not np.isfinite(counts).all()
            or min(counts) < 0
            or not counts[0]
        ):
            raise ValueError("counts of open ends that are none")
        self._rate.seen, self._rate.right = counts.tolist()


class _Proposal(NamedTuple):
    tokens: list[int]
    lengths: list[int]  # characters that each token completes
    open_end: float | None  # the draft's confidence in the last token, where it may be joined


_NOTHING = _Proposal([], [], None)


class _Drafted(NamedTuple):
    text: str
    starts: list[int]  # of each id of the draft, in characters of the text
    confidence: list[float]  # of each id
    is_closed: bool  # whether the draft says that the text ends here


class CrossTokenizerDrafter(Drafter):
    """Another drafter, which reads and drafts in the draft's ids, for a target with others.

    inner: hears of rounds in its own ids, without scores. What it drafts is cut before its
    special tokens. `text_counts` adds up over all generations.
    """

    name = "draft-model"
    traits = DrafterTraits(cost=Cost.PASS, draft_model=True)

    def __init__(self, inner: Drafter, target: TextCodec, draft: TextCodec) -> None:
        self._text_counts = TextCounts()
        self._inner = inner
        self._draft = PartCodec(draft)
        self._text = TokenAlignment(PartCodec(target), self._draft)
        self._told: tuple[int, list[int]] | None = None  # settled ids and others that inner read
        self._last = 0  # of those ids
        self._asked: TokenTree | None = None  # inner's draft token since then
        self._proposal = _NOTHING
        self._open_ends = _OpenEnds()

    def reopen(self) -> bool:
        return self._inner.reopen()

    @property
    def idle_reason(self) -> PlainReason | None:
        return self._inner.idle_reason

    def begin(self, prompt: Sequence[int]) -> None:
        self._told = None
        self._proposal = _NOTHING
        self._text.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        count = min(budget.num_draft_tokens, budget.num_rows - 1)
        self._proposal = _NOTHING
        candidate = self._draft_text(count, budget.min_reach) if count > 0 else None
        if candidate is None:
            return TokenTree.chain(pending)
        all_tokens = self._text.translate(candidate.text)
        tokens = all_tokens[:count]
        pieces = self._text.target_pieces(tokens)
        confidence = _confidence_of(candidate, pieces)
        open_end = None
        if tokens == all_tokens and tokens and not candidate.is_closed:
            open_end = confidence[-1]
            confidence[-1] *= self._open_ends.factor
        self._proposal = _Proposal(tokens, [len(piece) for piece in pieces], open_end)
        return TokenTree.chain(pending, tokens, confidence, self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        proposal, self._proposal = self._proposal, _NOTHING
        self._count(proposal, tree, verdict)
        decided = list(verdict.tokens[: len(proposal.tokens)])
        if proposal.open_end is not None and decided[:-1] == proposal.tokens[:-1]:
            self._open_ends.observe(proposal.open_end, decided == proposal.tokens)
        self._text.extend(verdict.tokens)

    @property
    def text_counts(self) -> TextCounts:
        return self._text_counts

    def state_dict(self) -> dict[str, np.ndarray]:
        inner = named("inner", self._inner.state_dict())
        return {"open_ends": self._open_ends.snapshot(), **inner}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self._open_ends.restore(state["open_ends"])
        self._inner.load_state_dict(part_of(state, "inner"))
        self._told = None

    def close(self) -> None:
        self._inner.close()

    def _draft_text(self, count: int, min_reach: float) -> _Drafted | None:
        """Returns what the draft writes in `count` of its ids; None where that is no text."""
        self._text.read()
        text = self._text
        last = text.open_ids or text.ids
        if not last:
            return None  # not even BOS
        self._tell()
        self._last = last[-1]
        limits = Budget(count, count + 1, branches=False, probes=False, min_reach=min_reach)
        tree = chain_first(self._inner.propose(self._last, limits), count + 1)
        self._asked = tree
        ids = tree.tokens[1:].tolist()
        end = next((at for at, id in enumerate(ids) if self._draft.is_marker(id)), len(ids))
        pieces = self._draft.pieces(ids[:end])
        starts = list(accumulate(map(len, pieces), initial=0))
        if not starts[-1]:
            return None
        confidence = tree.confidence[1:].tolist()
        return _Drafted("".join(pieces), starts[:-1], confidence[:end], end < len(ids))

    def _tell(self) -> None:
        """Brings the inner drafter up to date: what it read goes on, or begins again where the
        draft's tokenizer makes other ids of the longer text."""
        text = self._text
        asked, self._asked = self._asked, None
        new = None if self._told is None else self._new_ids(*self._told)
        if new is None or (asked is not None and not new):
            self._inner.begin(text.ids + text.open_ids)
        else:
            self._tell_outcome(asked, new)
        self._told = len(text.ids), list(text.open_ids)

    def _new_ids(self, num_settled: int, others: list[int]) -> list[int] | None:
        """Returns what follows the ids that inner read; None where they are not the text's now."""
        since = self._text.ids[num_settled:] + self._text.open_ids
        return since[len(others) :] if since[: len(others)] == others else None

    def _tell_outcome(self, asked: TokenTree | None, new: list[int]) -> None:
        """`new` as what became of the draft token, and of rounds in which others were right."""
        if asked is not None:
            draft_tokens = asked.tokens[1:].tolist()
            right = num_shared(draft_tokens, new)
            rows = tuple(range(1, right + 1))
            verdict = Verdict(tuple(new[: right + 1]), rows, right == len(draft_tokens))
            self._inner.observe(asked, _NO_SCORES, verdict)
            self._last, new = verdict.next_token, new[right + 1 :]
        if new:
            tree = TokenTree.chain(self._last, new[:-1])
            verdict = Verdict(tuple(new), tuple(range(1, len(new))), exhausted=True)
            self._inner.observe(tree, _NO_SCORES, verdict)

    def _count(self, proposal: _Proposal, tree: TokenTree, verdict: Verdict) -> None:
        proposed, accepted = self._text_counts
        row = 0
        for token, length in zip(proposal.tokens, proposal.lengths, strict=True):
            child = tree.child(row, token)
            if child is None or self.name not in tree.proposed_by[child].split("+"):
                break
            row = child
            proposed += length
            accepted += length if row in verdict.accepted_rows else 0
        self._text_counts = TextCounts(proposed, accepted)


def _confidence_of(candidate: _Drafted, pieces: Sequence[str]) -> list[float]:
    """Returns for each target token the product over the draft's tokens that begin in it.

    A token that only goes on with what was begun before it is as certain as that. Of tokens that
    share a character the first has the whole chance.
    """
    confidence, start, at = [], 0, 0
    for piece in pieces:
        end = start + len(piece)
        chance = 1.0
        while at < len(candidate.starts) and candidate.starts[at] < max(end, start + 1):
            chance *= candidate.confidence[at]
            at += 1
        confidence.append(chance)
        start = end
    return confidence

"""A smaller model writes ahead, greedily (Leviathan et al. 2023; Chen et al. 2023).

Its tokens are deterministic candidates here: what it likes best, not a sample. It stops where
the chance that all of them are right, by its own probabilities, falls below MIN_CONFIDENCE.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.drafters.protocol import Budget
from edge_spec.model import Forward, Model, Session
from edge_spec.tree import TokenTree, Verdict

MIN_CONFIDENCE = 0.4
MAX_CATCH_UP = 8  # tokens that a pass may score to reach the last; more are prefilled


class Draft:
    """A draft that is open beside its target: one model with one session, until `close`.

    vocab_size: of the target.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._session = model.open_session()

    def make_drafter(self) -> DraftModelDrafter:
        """Takes over the session from the drafter made before."""
        return DraftModelDrafter(self.model, self._session, self._vocab_size)

    def close(self) -> None:
        self._session.close()
        self.model.close()


class DraftModelDrafter:
    """Keeps a session of the draft in step with the text: rolled back and caught up as needed.

    vocab_size: of the target. Ids beyond the smaller vocabulary are padding: they are never
    proposed, and where the target writes one the draft reads another token in its place.
    """

    name = "draft-model"

    def __init__(self, draft: Model, session: Session, vocab_size: int) -> None:
        self._session = session
        self._context_length = draft.config.context_length
        self._vocab_size = min(draft.config.vocab_size, vocab_size)
        self._max_scored = min(MAX_CATCH_UP, draft.capabilities.max_rows)
        self._text: list[int] = []  # ends with the pending token
        self._held: list[int] = []  # what the draft's cache holds
        self._agreed = 0  # leading tokens of both that are known to be equal
        session.rollback(0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = self._readable(prompt)
        self._agreed = 0

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        # The draft reads the text and all guesses but the last.
        count = min(budget.num_draft_tokens, self._context_length - len(self._text) + 1)
        guesses: list[int] = []
        confidence: list[float] = []
        reached = 1.0
        while len(guesses) < count and reached >= MIN_CONFIDENCE:
            out = self._score([guesses[-1]]) if guesses else self._catch_up()
            logits = out.logits[-1, : self._vocab_size]
            guesses.append(int(logits.argmax()))
            confidence.append(float(1 / np.exp(logits - logits[guesses[-1]]).sum()))
            reached *= confidence[-1]
        return TokenTree.chain(pending, guesses, confidence, self.name)

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._text += self._readable(verdict.tokens)

    def _catch_up(self) -> Forward:
        """Scores the end of the text, with all of it in the cache."""
        last = min(len(self._held), len(self._text) - 1)
        while self._agreed < last and self._held[self._agreed] == self._text[self._agreed]:
            self._agreed += 1
        self._agreed = min(self._agreed, last)
        del self._held[self._agreed :]  # first: an interrupt may come between the two
        self._session.rollback(self._agreed)
        missing = self._text[self._agreed :]
        if len(missing) > self._max_scored:
            self._session.prefill(missing[:-1])
            self._held += missing[:-1]
            missing = missing[-1:]
        return self._score(missing)

    def _score(self, tokens: list[int]) -> Forward:
        """Scores these tokens, which join the cache."""
        out = self._session.forward(TokenTree.chain(tokens[0], tokens[1:]))
        self._session.commit(range(len(tokens)))
        self._held += tokens
        return out

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._vocab_size else 0 for token in tokens]

"""What a drafter may lose over plain decoding: never more than its account holds."""

from __future__ import annotations

from math import ceil, sqrt

FIRST = 1.5  # plain steps, at the beginning of a text
INCOME = 0.02  # likewise, a round, of one that has won lately
PUT_BY = 0.01  # likewise, at most, for reading what is written while it is not asked
_LEAST = 0.75  # likewise, at the beginning of a text, of one that has won lately
_MOST = 8.0  # likewise, ever
_STAKE = 0.8  # of what is left, so that one round does not end drafting
_LATELY = 64  # rounds without a gain, after which income has fallen by a third


class RegretAccount:
    """Counts in plain steps what the rounds of one drafter have won over plain decoding and what
    they may still lose.

    It may be asked only where the account pays for the worst that may come of it. So with it a text
    of R rounds takes at most FIRST + (INCOME + PUT_BY) * R plain steps longer than plain decoding
    would (docs/policy.md). One that does not win is tried the more seldom the longer that lasts: in
    R rounds it loses in the order of the root of R, as bandits do in the worst case (Auer et al.
    2002, The Nonstochastic Multiarmed Bandit Problem).
    """

    def __init__(self, balance: float = FIRST) -> None:
        self.balance = balance
        self._rounds = 0  # since it won

    def begin_text(self) -> None:
        """A text begins, which is to lose no more than any other: what was won in the texts before
        it is theirs. Where it has won lately it may try again."""
        self.balance = min(max(self.balance, _LEAST * self._income / INCOME), FIRST)

    def settle(self, gain: float) -> None:
        """Counts a round. gain: the plain steps that it has saved, negative where it was slower."""
        self._rounds += 1
        self.balance = min(_MOST, max(0.0, self.balance + gain) + self._income)
        if gain > 0 and self.balance > FIRST:
            self._rounds = 0

    def rest(self, rounds: int, unread: float) -> None:
        """Counts rounds in which it was not asked. unread: the plain steps that it will take to
        read what was written in one, for which something is put by."""
        for _ in range(rounds):
            self.settle(0.0)
        self.balance = min(_MOST, self.balance + rounds * min(unread, PUT_BY))

    def rounds_to(self, stake: float) -> int:
        """Returns after how many rounds, in which it is not asked, a round may lose so much."""
        missing = stake / _STAKE - self.balance
        return ceil(missing / self._income) if missing > 0 else 0

    @property
    def _income(self) -> float:
        return INCOME / sqrt(1 + self._rounds / _LATELY)

    @property
    def stake(self) -> float:
        """Returns the plain steps that one round may lose."""
        return _STAKE * self.balance

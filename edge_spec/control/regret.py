"""What drafting may lose, over plain decoding: never more than an account holds."""

from __future__ import annotations

FIRST = 2.0  # plain steps, at the beginning of a text
_MOST = 8.0  # likewise, ever
_STAKE = 0.6  # of what is left, so that one round does not end drafting
_INCOME = 0.02  # plain steps a round


class RegretAccount:
    """Counts in plain steps what a conversation's rounds have won over plain decoding and what they
    may still lose.

    A round may draft only where the account pays for all of its draft tokens being wrong. So
    decoding takes at most FIRST + _INCOME * rounds plain steps longer than plain decoding would,
    and what passes and drafters exceed the upper bounds of their times by (docs/policy.md).
    """

    def __init__(self) -> None:
        self.balance = FIRST

    def begin_text(self) -> None:
        """A text begins, which is to lose no more than any other: what was won in the texts before
        it is theirs."""
        self.balance = min(self.balance, FIRST)

    def settle(self, gain: float) -> None:
        """Counts a round. gain: the plain steps that it has saved, negative where it was slower."""
        self.balance = min(_MOST, max(0.0, self.balance + gain) + _INCOME)

    @property
    def stake(self) -> float:
        """Returns the plain steps that one round may lose."""
        return _STAKE * self.balance

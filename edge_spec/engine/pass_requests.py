"""Requests of conversations for passes over their target, which `SharedPasses` carries out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

from edge_spec.core.model import Forward, Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree


class Scored(NamedTuple):
    """num_rows: that `out` should have. charged_s: what of a pass that others shared is this
    conversation's part, without the time that it waited for its turn; None where it need not.
    num_sharing: conversations in the pass. tree: what was scored of the one that was asked for,
    where that is not all of it."""

    out: Forward
    num_rows: int
    charged_s: float | None = None
    num_sharing: int = 1
    tree: TokenTree | None = None


class Passes(Protocol):
    """The way that passes over the target go."""

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        """Scores every row of the tree, at least; or its first ones, if it comes with `values` of
        its rows (`RoundPlan`). num_rows: of a pass of its own, if more."""

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Commits `tokens` without returning scores."""

    def settle(self) -> None:
        """Returns when nothing is done in the background."""


class OwnPasses:
    """Each pass is of one session."""

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        padded = tree.padded(num_rows)
        return Scored(session.forward(padded), len(padded))

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        session.prefill(tokens)

    def settle(self) -> None:
        pass


class Wish(NamedTuple):
    """Rows that one conversation would have scored.

    values: of each row, the chance that it and all rows above it are right; the first is 1. least:
    rows that it has in any case, at least 1."""

    values: Sequence[float]
    least: int = 1


def deal_rows(
    wishes: Sequence[Wish], room: int, seconds: Callable[[int], float] | None
) -> list[int]:
    """Returns how many of its first rows each has scored, by what they are likely to bring (Liu et
    al. 2024, Optimizing Speculative Decoding for Serving Large Language Models Using Goodput; Li et
    al. 2025, AdaServe: verification by token, across requests): of all ways to fill at most `room`
    rows, the one that commits most tokens a second. Of equally likely rows those that are less deep
    come first, then those of earlier wishes. The same arguments give the same answer.

    seconds: of a pass by its rows; None where that is not known, and all that fits is scored.
    """
    if not wishes:
        return []
    dealt = [wish.least for wish in wishes]
    rows = sum(dealt)
    ordered = sorted(
        (-value, row, number)
        for number, wish in enumerate(wishes)
        for row, value in enumerate(accumulate(wish.values, min))  # no row before those above it
        if row >= wish.least
    )
    ordered = ordered[: max(0, room - rows)]
    if seconds is not None:
        tokens = sum(sum(wish.values[: wish.least]) for wish in wishes)
        ordered = ordered[: _fastest(ordered, tokens, rows, seconds)]
    for _, _, number in ordered:
        dealt[number] += 1
    return dealt


def _fastest(
    ordered: Sequence[tuple[float, int, int]],
    tokens: float,
    rows: int,
    seconds: Callable[[int], float],
) -> int:
    """Returns how many rows to add to `rows`, which bring `tokens`, for most tokens a second."""
    best, best_rate = 0, tokens / seconds(rows)
    for added, (lost, _, _) in enumerate(ordered, start=1):
        tokens -= lost
        rate = tokens / seconds(rows + added)
        if rate > best_rate:
            best, best_rate = added, rate
    return best


class Request:
    """One session's request. is_done: it has been carried out, or has failed. must_be_alone: a
    shared pass with it has failed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_done = False
        self.must_be_alone = False
        self._error: BaseException | None = None

    def run(self, passes: Passes) -> None:
        """Makes a pass of its own. Keeps an error for `require_no_error`."""
        with self._keeping_error():
            self._run(passes)

    def require_no_error(self) -> None:
        """Raises the error that the request has failed with, if it has."""
        if self._error is not None:
            raise self._error

    def _run(self, passes: Passes) -> None:
        raise NotImplementedError

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error, self.is_done = error, True


class TreeRequest(Request):
    """A tree to score: all of it, or its first rows where its `wish` leaves that open.

    num_rows: of the tree, in its next pass.
    """

    def __init__(
        self,
        session: Session,
        tree: TokenTree,
        width: int,
        values: Sequence[float] = (),
        least: int = 1,
    ) -> None:
        """width: of a pass of its own, if more than the tree's rows. values: of the rows of a tree
        of which at least the first `least` are to be scored; empty where it is not divided."""
        super().__init__(session)
        self.wish = Wish(values, min(least, len(tree))) if values else Wish((1.0,), len(tree))
        self.num_rows = len(tree)
        self._tree = tree
        self._width = width
        self._scored: Scored | None = None
        self._spent_s = 0.0

    def deal(self, num_rows: int | None) -> None:
        """Puts that many of its first rows into the next pass; None: all of them."""
        self.num_rows = len(self._tree) if num_rows is None else num_rows

    @property
    def can_join(self) -> bool:
        """Tells whether a shared pass can score it: a tree on an empty cache may take one more
        pass."""
        return self.session.length > 0 or self._tree.is_chain

    def part(self) -> PassPart:
        """Returns what it has in a shared pass."""
        return PassPart(self.session, self._tree.first_rows(self.num_rows))

    def charge(self, seconds: float) -> None:
        """Adds to the seconds that its conversation is charged for."""
        self._spent_s += seconds

    def finish(self, out: Forward, num_sharing: int) -> None:
        """Takes what a pass of `num_sharing` conversations gave."""
        tree = self._tree.first_rows(self.num_rows)
        self._scored = Scored(out, len(tree), num_sharing=num_sharing, tree=tree)
        self.is_done = True

    def scored(self) -> Scored:
        """Returns the scores, once it is done."""
        assert self._scored is not None
        return self._scored._replace(charged_s=self._spent_s)

    def _run(self, passes: Passes) -> None:
        self._scored = passes.forward(self.session, self._tree, self._width)
        self.is_done = True


def deal_pass(
    waiting: Sequence[TreeRequest],
    room: int,
    most: int,
    seconds: Callable[[int], float] | None,
) -> list[TreeRequest]:
    """Returns the oldest `most` that fit a pass of `room` rows, and deals its rows out to them by
    what these are worth over all. seconds: of a pass by its rows, if known."""
    chosen: list[TreeRequest] = []
    rows = 0
    for request in waiting:
        if len(chosen) < most and rows + request.wish.least <= room:
            chosen.append(request)
            rows += request.wish.least
    counts = deal_rows([request.wish for request in chosen], room, seconds)
    for request, num_rows in zip(chosen, counts, strict=True):
        request.deal(num_rows)
    return chosen


class PromptRequest(Request):
    """Tokens to commit, in as many passes as it takes.

    most_tokens: of its next pass; None: all that are left.
    """

    def __init__(self, session: Session, tokens: Sequence[int]) -> None:
        super().__init__(session)
        self.most_tokens: int | None = None
        self._tokens = tokens
        self._start = session.length

    def part(self) -> PassPart:
        """Returns what it has in a shared pass."""
        taken = self._left[: self.most_tokens]
        return PassPart(self.session, TokenTree.chain(taken[0], taken[1:]), is_scored=False)

    def finish(self, num_tokens: int) -> None:
        """Keeps what a shared pass has read. Keeps an error for `require_no_error`."""
        with self._keeping_error():
            self.session.commit(range(num_tokens))
            self.is_done = not len(self._left)

    @property
    def _left(self) -> Sequence[int]:
        return self._tokens[self.session.length - self._start :]

    def _run(self, passes: Passes) -> None:
        left = self._left
        count = len(left)
        if self.most_tokens is not None:  # in passes of about one length: none has a token or two
            num_passes = -(-count // self.most_tokens)
            count = -(-count // num_passes)
        passes.prefill(self.session, left[:count])
        self.is_done = count == len(left)

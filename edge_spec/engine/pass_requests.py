"""What conversations ask of a pass that they may share, and when each is likely to ask again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edge_spec.core.model import Forward, Session
from edge_spec.core.shared_pass import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.engine.passes import Passes, Scored
from edge_spec.engine.row_dealing import Wish, deal_rows

_WEIGHT = 0.3  # of the last time between two passes
_LATE = 2.0  # times that, after which nobody is expected any more
_SLACK_S = 0.001
_PAUSE_S = 1.0  # between two answers, not between two passes


class Arrivals:
    """When one conversation comes for its passes."""

    def __init__(self) -> None:
        self._gap_s: float | None = None  # from the end of a pass to the next request
        self._left_s: float | None = None

    @property
    def due_s(self) -> float:
        """When it comes again, as far as its last passes tell."""
        return (self._left_s or 0.0) + (self._gap_s or 0.0)

    def is_expected(self, now: float) -> bool:
        if self._gap_s is None or self._left_s is None:
            return False
        return now < self._left_s + _LATE * self._gap_s + _SLACK_S

    def arrived(self, now: float) -> None:
        if self._left_s is None:
            return
        gap_s = now - self._left_s
        if gap_s < _PAUSE_S:
            known = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = known + _WEIGHT * (gap_s - known)
        self._left_s = None  # it is here

    def left(self, now: float) -> None:
        self._left_s = now


class Request:
    """One session's wish. is_done: it has what it wanted, or an error; alone: only a pass of its
    own is left to it; num_sharing: conversations in its last pass. arrived_s, ready_s: since when
    it waits at all, and for its next pass."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.arrived_s = self.ready_s = 0.0
        self.is_done = False
        self.alone = False
        self.num_sharing = 1
        self._error: BaseException | None = None
        self._charged_s = 0.0

    @property
    def num_rows(self) -> int:
        """Of the next pass, as far as they are its own."""
        raise NotImplementedError

    @property
    def can_join(self) -> bool:
        return True

    @property
    def is_timed(self) -> bool:
        """Whether its own pass tells what rows take."""
        return True

    def part(self) -> PassPart:
        raise NotImplementedError

    def finish(self, out: Forward) -> None:
        """out: what a shared pass gave. What taking it raises, the conversation is told."""
        with self._telling_errors():
            self._finish(out)

    def run(self, passes: Passes) -> None:
        """A pass of its own. What that raises, the conversation is told."""
        with self._telling_errors():
            self._run(passes)

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error, self.is_done = error, True

    def charge(self, seconds: float) -> None:
        self._charged_s += seconds

    def require_no_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _finish(self, out: Forward) -> None:
        raise NotImplementedError

    def _run(self, passes: Passes) -> None:
        raise NotImplementedError


class TreeRequest(Request):
    """A tree to score: all of it, or its first rows where its `wish` leaves that open."""

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
        self._tree = tree
        self._width = width
        self._num_dealt = len(tree)
        self._scored: Scored | None = None

    @property
    def num_rows(self) -> int:
        return self._num_dealt

    def deal(self, num_rows: int | None) -> None:
        """So many of its rows, into the next pass; None: all."""
        self._num_dealt = len(self._tree) if num_rows is None else num_rows

    @property
    def can_join(self) -> bool:
        """A tree on an empty cache may take a pass more."""
        return self.session.length > 0 or self._tree.is_chain

    def part(self) -> PassPart:
        return PassPart(self.session, self._tree.first_rows(self._num_dealt))

    def _finish(self, out: Forward) -> None:
        tree = self._tree.first_rows(self._num_dealt)
        self._scored, self.is_done = Scored(out, len(tree), tree=tree), True

    def scored(self) -> Scored:
        """Once it is done."""
        assert self._scored is not None
        return self._scored._replace(charged_s=self._charged_s, num_sharing=self.num_sharing)

    def _run(self, passes: Passes) -> None:
        self._scored = passes.forward(self.session, self._tree, self._width)
        self.is_done = True


def dealt(
    waiting: Sequence[TreeRequest],
    room: int,
    most: int,
    seconds: Callable[[int], float] | None,
) -> list[TreeRequest]:
    """Returns the oldest `most` that fit a pass of so many rows, and deals out its rows to them by
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

    token_s: what each of its next ones takes, as far as its last slices tell."""

    def __init__(self, session: Session, tokens: Sequence[int]) -> None:
        super().__init__(session)
        self._tokens = tokens
        self._start = session.length
        self._num_taken = len(tokens)
        self.token_s: float | None = None

    @property
    def num_rows(self) -> int:
        return self._num_taken

    @property
    def num_left(self) -> int:
        return len(self._left)

    @property
    def is_begun(self) -> bool:
        return self.session.length > self._start

    @property
    def is_timed(self) -> bool:
        return False  # the head does not score its rows

    def take(self, num_tokens: int | None) -> None:
        """Of the tokens that are left, into the next pass; None: all."""
        left = self.num_left
        self._num_taken = left if num_tokens is None else min(left, num_tokens)

    def part(self) -> PassPart:
        taken = self._left[: self._num_taken]
        return PassPart(self.session, TokenTree.chain(taken[0], taken[1:]), scored=False)

    def _finish(self, out: Forward) -> None:
        self.session.commit(range(self._num_taken))
        self._ends()

    @property
    def _left(self) -> Sequence[int]:
        return self._tokens[self.session.length - self._start :]

    def _run(self, passes: Passes) -> None:
        passes.prefill(self.session, self._left[: self._num_taken])
        self._ends()

    def _ends(self) -> None:
        self.is_done = not len(self._left)
        self._num_taken = len(self._left)

"""Conversations on one target make their passes together, where that is faster.

A pass takes most of its time for the weights, which it reads once for all rows, so those of several
conversations are scored side by side (Yu et al. 2022, Orca: iteration-level scheduling). A
conversation joins and leaves with each pass. Who comes first waits for another one that is about to
come only while that wins more than it costs: at most as long as the weights take once more. Prompts
are read in slices beside the rows of others (prompt_slices.py), so that a long one makes nobody's
pass more than about twice as long.

No text depends on who else is there: where texts are promised to be bit-identical, passes are
shared only if that was measured to change no bit, and prompts are divided only likewise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition, Lock
from weakref import WeakKeyDictionary

from edge_spec.control.concurrency import Concurrency
from edge_spec.control.pass_times import SharingTimes
from edge_spec.core.features import collects
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.shared_pass import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree
from edge_spec.engine.pass_requests import Arrivals, PromptRequest, Request, TreeRequest, dealt
from edge_spec.engine.passes import OwnPasses, Scored
from edge_spec.engine.prompt_slices import LEAST_SLICE, MOST_ALONE, PromptSlices
from edge_spec.engine.sharing_setup import SharingSetup
from edge_spec.exactness.lossless import Losslessness
from edge_spec.exactness.sharing import wider

_WEIGHT = 0.1  # of the last pass that scored, or round, in what is usual
_CROWDED = 0.5  # of rounds, from which on wider passes are looked for

_log = logging.getLogger(__name__)


class SharedPasses:
    """Passes of all conversations on one model. Any thread may call, each with its own session.

    One pass is made at a time, by the thread of whoever has waited longest, for as many as fit.
    """

    def __init__(
        self,
        model: Model,
        lossless: Losslessness,
        load: Concurrency,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._lossless = lossless
        self._load = load
        self._clock = clock
        self._own = OwnPasses()
        self._turn = Condition(Lock())
        self._queue: list[Request] = []  # the oldest first
        self._is_running = False
        self._setup = SharingSetup(model, lossless, self._together)
        self._times = SharingTimes()
        self._slices = PromptSlices(self._times)
        self._usual_rows = 1.0  # of passes that score
        self._crowded = 0.0  # share of the last rounds that had all the rows they may
        self._arrivals: WeakKeyDictionary[Session, Arrivals] = WeakKeyDictionary()
        load.rows_each = self.rows_each
        load.rows_most = self.rows_most

    @property
    def most(self) -> int:
        """Conversations that may share a pass now."""
        return self._setup.most

    def rows_each(self) -> int | None:
        """Rows that a conversation may have now, so that all fit one pass. None where they take
        turns."""
        if self.most < 2 or self._times.rests:
            return None
        return max(1, self._free_rows() // self._num_active)

    def rows_most(self) -> int | None:
        """Rows that a conversation may have now where all others have one. None where they take
        turns."""
        if self.most < 2 or self._times.rests:
            return None
        return max(1, self._free_rows() - self._num_active + 1)

    def _free_rows(self) -> int:
        """Of a pass, beside the slice of a prompt."""
        is_read = any(isinstance(request, PromptRequest) for request in list(self._queue))
        return self._setup.widest - is_read * LEAST_SLICE

    @property
    def _num_active(self) -> int:
        return max(1, min(self._load.active, self.most))

    def prepare_for(self, num_conversations: int) -> None:
        """Begins to make ready for so many conversations, in another thread."""
        self._setup.prepare_for(num_conversations)

    def settle(self) -> None:
        """Returns when nothing is being prepared."""
        self._setup.settle()

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        self.prepare_for(self._load.active)
        if self.most < 2:
            return self._own.forward(session, tree, num_rows)
        if (most_rows := self.rows_each()) is not None:
            self._crowded += _WEIGHT * ((len(tree) >= most_rows) - self._crowded)
            if self._crowded > _CROWDED:
                self._setup.widen()
        # A single row of several would be taken for a plain step, which decides near ties.
        least = 2 if self._lossless.replays else 1
        request = TreeRequest(session, tree, num_rows, values, least)
        self._submit(request)
        return request.scored()

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        if self.most < 2:
            self._own.prefill(session, tokens)
        elif len(tokens):
            self._submit(PromptRequest(session, tokens))

    def _together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """A pass of nobody in the queue."""
        assert isinstance(self._model, SharesPasses)
        with self._turn:
            while self._is_running:
                self._turn.wait()
            self._is_running = True
        try:
            return self._model.forward_together(parts, num_rows)
        finally:
            with self._turn:
                self._is_running = False
                self._turn.notify_all()

    def _submit(self, request: Request) -> None:
        """Returns when the request is done; raises what it failed with."""
        with self._turn:
            self._arrivals_of(request.session).arrived(self._clock())
            request.arrived_s = request.ready_s = self._clock()
            self._queue.append(request)
            self._turn.notify_all()  # who waits for company may go
            try:
                while not request.is_done:
                    if self._is_running or self._queue[0] is not request:
                        self._turn.wait()
                        continue
                    wait_s = self._worth_waiting_s()
                    if wait_s > 0:
                        self._turn.wait(wait_s)
                    else:
                        self._lead()
            except BaseException:
                while self._is_running:  # the pass may write to this session's cache
                    self._turn.wait()
                if request in self._queue:
                    self._queue.remove(request)
                self._turn.notify_all()
                raise
        request.require_no_error()

    def _lead(self) -> None:
        """Makes the next pass, without the lock meanwhile."""
        chosen = self._take()
        self._is_running = True
        self._turn.release()
        try:
            self._run(chosen)
        finally:
            self._turn.acquire()
            self._is_running = False
            now = self._clock()
            for request in chosen:
                if request.is_done:
                    self._arrivals_of(request.session).left(now)
            left = [request for request in chosen if not request.is_done]
            read: list[Request] = [each for each in left if isinstance(each, PromptRequest)]
            # A prompt has just had its slice: others are first now, and those who had theirs beside
            # it are about to come again.
            for prompt in read:
                prompt.ready_s = now
            self._queue = [each for each in left if each not in read] + self._queue + read
            self._turn.notify_all()

    def _take(self) -> list[Request]:
        """Out of the queue, what goes into the next pass; who has waited longest is among them."""
        self._queue = self._slices.in_turn(self._queue)
        first = self._queue[0]
        chosen: list[Request] = []
        if not self._times.rests and self._joins(first):
            chosen = self._fitting()
        self._times.count()
        if len(chosen) < 2:
            chosen = [first]
            if isinstance(first, PromptRequest):
                self._take_alone(first)
            elif isinstance(first, TreeRequest):
                first.deal(None)
        for request in chosen:
            self._queue.remove(request)
        return chosen

    def _take_alone(self, prompt: PromptRequest) -> None:
        """For a pass of its own."""
        if not self._setup.sharing.slices:
            prompt.take(None)
        elif self._is_company(prompt):
            self._slices.take([prompt], 0, self._usual_rows, self._setup.widest)
        else:
            prompt.take(MOST_ALONE)

    def _fitting(self) -> list[Request]:
        """As many rows as one pass takes, the oldest first, and beside them slices of prompts."""
        waiting = [request for request in self._queue if self._joins(request)]
        prompts = [request for request in waiting if isinstance(request, PromptRequest)]
        limit = self._setup.widest - (LEAST_SLICE if prompts else 0)
        trees = [request for request in waiting if isinstance(request, TreeRequest)]
        most = self.most - bool(prompts)
        chosen: list[Request] = [*dealt(trees, limit, most, self._pass_s())]
        rows = sum(request.num_rows for request in chosen)
        if chosen and prompts and not (self._slices.pauses() and chosen[0] is self._queue[0]):
            prompts = prompts[: self.most - len(chosen)]
            room = self._setup.widest - rows
            taken, is_short = self._slices.take(prompts, rows, self._usual_rows, room)
            chosen += taken
            if is_short:
                self._setup.widen()
        return chosen if self._queue[0] in chosen else []

    def _pass_s(self) -> Callable[[int], float] | None:
        """What shared passes take by their rows, widened as they are. None before that is known."""
        times, widths = self._times.all, self._setup.sharing.widths
        if times.num_observed < 2 or times.at(1) <= 0:
            return None
        return lambda rows: times.at(wider(rows, widths) or rows)

    def _joins(self, request: Request) -> bool:
        """Near ties that plain steps decide are left to passes of a single row, which are
        nobody else's; features are given by a session's own passes alone."""
        if request.alone or not request.can_join or collects(request.session):
            return False
        if isinstance(request, PromptRequest):
            return self._setup.sharing.slices
        return not (self._lossless.replays and request.num_rows == 1)

    def _is_company(self, request: Request) -> bool:
        """Whether others write in these moments, whom a long pass would hold up."""
        now = self._clock()
        return any(
            arrivals.is_expected(now)
            for session, arrivals in self._arrivals.items()
            if session is not request.session
        ) or any(isinstance(other, TreeRequest) for other in self._queue)

    def _worth_waiting_s(self) -> float:
        """For another conversation: as long as one pass less would save, at most; 0 for not."""
        first = self._queue[0]
        if self._times.rests or len(self._queue) >= self.most or not self._joins(first):
            return 0.0
        now = self._clock()
        deadline = first.ready_s + self._times.all.fixed_s
        waiting = {id(request.session) for request in self._queue}
        expected = [
            arrivals.due_s
            for session, arrivals in self._arrivals.items()
            if id(session) not in waiting and arrivals.is_expected(now)
        ]
        if now >= deadline or not any(due < deadline for due in expected):
            return 0.0
        return deadline - now

    def _run(self, chosen: Sequence[Request]) -> None:
        started = self._clock()
        rows = sum(request.num_rows for request in chosen)
        if len(chosen) == 1:
            chosen[0].run(self._own)
            seconds = self._clock() - started
            chosen[0].charge(seconds)
            if chosen[0].is_timed:
                self._times.observe_alone(rows, seconds)
            elif isinstance(chosen[0], PromptRequest) and rows <= self._setup.widest:
                self._slices.observe([chosen[0]], 0, rows, seconds)
            return
        width = wider(rows, self._setup.sharing.widths)
        assert width is not None and isinstance(self._model, SharesPasses)
        try:
            outs = self._model.forward_together([request.part() for request in chosen], width)
        except Exception as error:
            _log.info("a pass of several conversations failed, each is made alone: %s", error)
            for request in chosen:
                request.alone = True
            self._times.rest()
            return
        self._observe(chosen, outs, self._clock() - started)

    def _observe(self, chosen: Sequence[Request], outs: Sequence[Forward], seconds: float) -> None:
        rows = [request.num_rows for request in chosen]
        scored = sum(each.num_rows for each in chosen if isinstance(each, TreeRequest))
        prompts = [each for each in chosen if isinstance(each, PromptRequest)]
        if prompts:
            self._slices.observe(prompts, scored, sum(rows) - scored, seconds)
        else:
            self._times.observe_shared(rows, seconds)
        if scored:
            self._usual_rows += _WEIGHT * (scored - self._usual_rows)
        charges = self._times.charges(rows, seconds)
        for request, out, charged_s in zip(chosen, outs, charges, strict=True):
            request.num_sharing = len(chosen)
            request.charge(charged_s)
            request.finish(out)

    def _arrivals_of(self, session: Session) -> Arrivals:
        return self._arrivals.setdefault(session, Arrivals())

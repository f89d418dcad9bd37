"""Conversations on one target make their passes together, where that is faster.

A pass takes most of its time for the weights, which it reads once for all rows, so those of several
conversations are scored side by side (Yu et al. 2022, Orca: iteration-level scheduling). A
conversation joins and leaves with each pass. Where kernels make rows cheap, a prompt is read beside
the rows of those who write, as many of its tokens a pass as make it last twice as long (Agrawal et
al. 2024, Sarathi-Serve). Elsewhere prompts have passes of their own, which take turns with those of
the others: slices of a few tokens beside these took longer a token.

No text depends on who else is there: where texts are promised to be bit-identical, passes are
shared only if that was measured to change no bit, and prompts are divided only likewise; where
kernels compute a row alike by construction, both hold without measuring.

On onnxruntime each conversation attends to its own cache, by an operator of its own in one graph
(runtimes/ort/joint_graph.py), which holds another copy of the packed weights. On llama.cpp all are
in one cache (runtimes/llamacpp/cache.py) where our kernels compute. Models with a sliding window
take turns there: their sequences cannot be moved whole.

A conversation is charged for its rows' part of a pass, so it drafts less as others make rows
dearer. Rows are dealt out over all of them by what they are likely to bring
(pass_requests.py), and beginnings that prompts share are read once (prompt_cache.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition, Lock

from edge_spec.core.features import collects_alone
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.runtime_protocols import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree
from edge_spec.engine.pass_requests import (
    OwnPasses,
    PromptRequest,
    Request,
    Scored,
    TreeRequest,
    deal_pass,
)
from edge_spec.engine.sharing_times import Returns, SharingTimes, SliceTimes
from edge_spec.scheduler.lossless import SLICE_TOKENS, Losslessness, SharingSetup, wider
from edge_spec.scheduler.policy import Concurrency

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
        self._is_prompts_turn = True
        self._setup = SharingSetup(model, lossless, self._together)
        self._times = SharingTimes()
        self._returns = Returns()
        self._slices = SliceTimes(self._times.all)
        load.rows_each = self.rows_each
        load.rows_most = self.rows_most

    @property
    def most(self) -> int:
        """Conversations that may share a pass now."""
        return self._setup.most

    def rows_each(self) -> int | None:
        """Returns how many rows a conversation may have now so that all fit one pass; None where
        they take turns."""
        if self.most < 2 or self._times.rests:
            return None
        return max(1, self._setup.widest // self._num_active)

    def rows_most(self) -> int | None:
        """Returns how many rows a conversation may have now where all others have one; None where
        they take turns."""
        if self.most < 2 or self._times.rests:
            return None
        return max(1, self._setup.widest - self._num_active + 1)

    @property
    def _num_active(self) -> int:
        return max(1, min(self._load.active, self.most))

    def wait_for_requests(self, count: int, timeout_s: float) -> bool:
        """Returns as soon as at least `count` requests wait or run; False if they do not come."""
        with self._turn:
            return self._turn.wait_for(lambda: len(self._queue) >= count, timeout_s)

    @property
    def num_waiting(self) -> int:
        """Requests that wait or run."""
        return len(self._queue)

    def prepare_for(self, num_conversations: int) -> None:
        """Begins to make ready for that many conversations, in another thread."""
        self._setup.prepare_for(num_conversations)

    def settle(self) -> None:
        """Returns when nothing is being prepared."""
        self._setup.settle()

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int, values: Sequence[float] = ()
    ) -> Scored:
        """Scores a tree, as `Passes.forward` says. Raises what the session's own pass raises."""
        self.prepare_for(self._load.active)
        if self.most < 2:
            return self._own.forward(session, tree, num_rows)
        # A single row of several would be taken for a plain step, which decides near ties.
        least = 2 if self._lossless.replays else 1
        request = TreeRequest(session, tree, num_rows, values, least)
        self._submit(request)
        return request.scored()

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Commits tokens. Raises what the session's own `prefill` raises."""
        if self.most < 2:
            self._own.prefill(session, tokens)
        elif len(tokens):
            self._submit(PromptRequest(session, tokens))

    def _together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Makes a pass of nobody in the queue."""
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
            self._returns.arrived(request.session, self._clock())
            self._queue.append(request)
            self._turn.notify_all()  # who waits for company may go
            try:
                nobody_came = False
                while not request.is_done:
                    if self._is_running or self._queue[0] is not request:
                        self._turn.wait()
                        continue
                    wait_s = 0.0 if nobody_came else self._worth_waiting_s()
                    if wait_s > 0:  # then again: a pass of nobody in the queue may run by now
                        nobody_came = not self._turn.wait(wait_s)
                    else:
                        nobody_came = False
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
        chosen = self._next()
        self._is_running = True
        self._turn.release()
        try:
            if isinstance(chosen, PromptRequest):
                chosen.run(self._own)
            else:
                self._score(*chosen)
        finally:
            self._turn.acquire()
            self._is_running = False
            now = self._clock()
            for request in self._queue:
                if request.is_done and isinstance(request, TreeRequest):
                    self._returns.left(request.session, now)
            self._queue = [request for request in self._queue if not request.is_done]
            self._turn.notify_all()

    def _next(self) -> PromptRequest | tuple[list[TreeRequest], PromptRequest | None]:
        """Returns what the next pass is of: a prompt, or trees, maybe with a prompt that is read
        beside them. Prompts and trees that share no pass take turns."""
        trees, prompts = self._waiting()
        beside = None
        if prompts and trees and self._joins(trees[0]) and self._reads_beside(prompts[0]):
            beside = prompts[0]
        if prompts and not beside and (self._is_prompts_turn or not trees):
            self._is_prompts_turn = False
            is_company = len(trees) > 0 or self._load.active > len(prompts)
            is_divided = is_company and self._setup.sharing.slices
            prompts[0].most_tokens = SLICE_TOKENS if is_divided else None
            return prompts[0]
        self._is_prompts_turn = True
        self._times.count()
        chosen: list[TreeRequest] = []
        if not self._times.rests and self._joins(trees[0]):
            joining = [request for request in trees if self._joins(request)]
            room = self._setup.widest - (beside is not None)
            chosen = deal_pass(joining, room, self.most, self._pass_s())
        if (len(chosen) < 2 and not (beside and chosen)) or chosen[0] is not trees[0]:
            chosen, beside = trees[:1], None
            chosen[0].deal(None)
        if beside is not None:
            rows = sum(each.num_rows for each in chosen)
            beside.most_tokens = self._slices.num_tokens(rows, self._setup.widest - rows)
        return chosen, beside

    def _reads_beside(self, prompt: PromptRequest) -> bool:
        """Tells whether a prompt may be read in passes with the rows of others."""
        if not self._model.capabilities.invariant_rows or self._setup.sharing.widths:
            return False
        return not (self._times.rests or prompt.must_be_alone or collects_alone(prompt.session))

    def _waiting(self) -> tuple[list[TreeRequest], list[PromptRequest]]:
        trees = [request for request in self._queue if isinstance(request, TreeRequest)]
        return trees, [request for request in self._queue if isinstance(request, PromptRequest)]

    def _pass_s(self) -> Callable[[int], float] | None:
        """Returns what shared passes take by their rows, widened as they are; None before that is
        known."""
        times, widths = self._times.all, self._setup.sharing.widths
        if times.num_observed < 2 or times.at(1) <= 0:
            return None
        return lambda rows: times.at(wider(rows, widths) or rows)

    def _joins(self, request: TreeRequest) -> bool:
        """Tells whether it may share a pass. Near ties that plain steps decide are left to passes
        of a single row, which are nobody else's; features may be given by own passes alone."""
        if request.must_be_alone or not request.can_join or collects_alone(request.session):
            return False
        return not (self._lossless.replays and request.num_rows == 1)

    def _worth_waiting_s(self) -> float:
        """Returns how long the next pass waits for conversations that came in time before: without
        them it would take nearly as long, and they would need another one. 0 for not at all."""
        trees, prompts = self._waiting()
        takes_turns = bool(prompts) and not self._reads_beside(prompts[0])
        if takes_turns and (self._is_prompts_turn or not trees):
            return 0.0
        if self._times.rests or len(trees) >= self.most or not all(map(self._joins, trees[:1])):
            return 0.0
        return self._returns.wait_s(self._clock())

    def _score(self, chosen: Sequence[TreeRequest], beside: PromptRequest | None) -> None:
        """beside: whose slice the pass has, too."""
        started = self._clock()
        if len(chosen) == 1 and beside is None:
            chosen[0].run(self._own)
            seconds = self._clock() - started
            chosen[0].charge(seconds)
            self._returns.observe(seconds)
            self._times.observe_alone(chosen[0].num_rows, seconds)
            return
        requests: list[TreeRequest | PromptRequest] = [*chosen]
        requests += [] if beside is None else [beside]
        parts = [request.part() for request in requests]
        rows = [len(part.tree) for part in parts]
        width = wider(sum(rows), self._setup.sharing.widths)
        assert width is not None and isinstance(self._model, SharesPasses)
        try:
            outs = self._model.forward_together(parts, width)
        except Exception as error:
            _log.info("a pass of several conversations failed, each is made alone: %s", error)
            for request in requests:
                request.must_be_alone = True
            self._times.rest()
            return
        seconds = self._clock() - started
        self._returns.observe(seconds)
        if beside is None:
            self._times.observe_shared(rows, seconds)
        else:
            self._slices.observe(sum(rows[:-1]), rows[-1], seconds)
            beside.finish(rows[-1])
        charges = self._times.charges(rows, seconds)
        for request, out, charged_s in zip(chosen, outs, charges, strict=False):
            request.charge(charged_s)
            request.finish(out, len(requests))

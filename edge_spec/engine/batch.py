"""Makes every pass of a target, for one conversation or several at once.

A pass mostly reads weights, so it scores rows of several conversations together (Yu et al. 2022,
Orca: iteration-level scheduling). Where kernels make rows cheap, it also reads slices of prompts
that at most double it (Agrawal et al. 2024, Sarathi-Serve); elsewhere small slices took longer per
token, so prompts take turns with other passes.

No text depends on other conversations. With batch-invariant kernels, passes may be shared and
prompts divided at will. Otherwise shared passes keep to the widths of single conversations, and
sharing and dividing start only after measuring that they change no bit.

On onnxruntime each conversation has its own cache and attention operator in one graph
(runtimes/ort/joint_graph.py), with another copy of the packed weights. On llama.cpp all share one
cache (runtimes/llamacpp/cache.py) where our kernels compute; models with a sliding window take
turns, because their sequences cannot be moved whole.

A conversation is charged for its part of a pass, so it drafts less as others make rows expensive;
until costs are known, within its share of the rows, since speculation gains less in large batches
(Liu et al. 2024, Optimizing Speculative Decoding for Serving Large Language Models Using Goodput).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock, Thread
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from edge_spec.core.features import collects_alone
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.runtime_protocols import PassPart, SharesPasses
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Cost, Drafter
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.dealing import Wish, charge, deal_rows
from edge_spec.scheduler.lossless import (
    SLICE_TOKENS,
    Losslessness,
    shares_alike,
    slices_alike,
    wider,
)

_ANY_ROWS = 64  # of a shared pass without fixed widths
_LEAST_SLICE = 8  # prompt tokens per shared pass, however long they take
_SLICE_WEIGHT = 0.2  # of the last slice in the mean
_LEAST_TOKEN_S = 1e-6
_ALONE = 4  # passes alone after which a conversation stops looking for company
# Passes without sharing after a shared one failed. The longest rest takes about half a minute.
_FIRST_REST, _LONGEST_REST = 64, 4096
# Of the last pass: without the awaited conversation, the next takes nearly as long.
_WAITING_SHARE = 0.5
_UNKNOWN_COSTS = {1: 1.0, 16: 2.0}  # proportions, until passes are measured

_log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """The outcome of a pass for one conversation.

    num_rows: expected in `out`. charged_s: its part of the pass, without waiting for its turn; None
    if the pass was not queued. num_sharing: conversations in the pass. tree: the scored part of the
    tree, if it may be less.
    """

    out: Forward
    num_rows: int
    charged_s: float | None = None
    num_sharing: int = 1
    tree: TokenTree | None = None


class _Request:
    """One session's request. num_rows: its rows in the next pass. is_done: completed, or failed
    with `error`. must_be_alone: a shared pass with it failed."""

    def __init__(self, session: Session, num_rows: int) -> None:
        self.session = session
        self.num_rows = num_rows
        self.is_done = False
        self.must_be_alone = False
        self.error: Exception | None = None

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error, self.is_done = error, True


class _TreeRequest(_Request):
    """A tree to score: all of it, or the first rows that its `wish` allows."""

    def __init__(
        self, session: Session, tree: TokenTree, width: int, values: Sequence[float], least: int
    ) -> None:
        """width: of its own pass, if wider than the tree. values: of a tree that may be cut to
        `least` rows; empty if it may not."""
        super().__init__(session, len(tree))
        self.tree = tree
        self.wish = Wish(values, min(least, len(tree))) if values else Wish((1.0,), len(tree))
        self.charged_s = 0.0
        self.scored: Scored | None = None
        self._width = width

    def part(self) -> PassPart:
        return PassPart(self.session, self.tree.first_rows(self.num_rows))

    def run(self) -> int:
        padded = self.tree.padded(self._width)
        self.finish(self.session.forward(padded), len(padded), 1)
        return len(padded)

    def finish(self, out: Forward, num_rows: int, num_sharing: int) -> None:
        tree = self.tree.first_rows(self.num_rows)
        self.scored = Scored(out, num_rows, None, num_sharing, tree)
        self.is_done = True


class _PromptRequest(_Request):
    """Tokens to commit, in as many passes as needed."""

    def __init__(self, session: Session, tokens: Sequence[int]) -> None:
        super().__init__(session, len(tokens))
        self._tokens = tokens
        self._start = session.length

    @property
    def left(self) -> Sequence[int]:
        return self._tokens[self.session.length - self._start :]

    def part(self) -> PassPart:
        taken = self.left[: self.num_rows]
        return PassPart(self.session, TokenTree.chain(taken[0], taken[1:]), is_scored=False)

    def run(self) -> int:
        """Read the next rows in a pass of its own; return their number."""
        self.session.prefill(self.left[: self.num_rows])
        self.is_done = not len(self.left)
        return self.num_rows

    def finish(self, num_tokens: int) -> None:
        self.session.commit(range(num_tokens))
        self.is_done = not len(self.left)


class _Returns:
    """Estimates how long a pass should wait for conversations that came back in time before.
    Without them it takes nearly as long, and they need another pass."""

    def __init__(self) -> None:
        self._patience_s = 0.0
        self._left_s: WeakKeyDictionary[Session, float] = WeakKeyDictionary()
        self._soon: WeakSet[Session] = WeakSet()  # those that came in time last

    def left(self, session: Session, now: float, pass_s: float) -> None:
        """Record that a conversation had its pass of `pass_s` seconds."""
        self._patience_s = _WAITING_SHARE * pass_s
        self._left_s[session] = now

    def arrived(self, session: Session, now: float) -> None:
        left_s = self._left_s.pop(session, None)
        if left_s is None or now - left_s > self._patience_s:
            self._soon.discard(session)
        else:
            self._soon.add(session)

    def wait_s(self, now: float) -> float:
        """Return how much longer to wait for those that are due; 0 for none."""
        due = [self._left_s[session] for session in self._soon if session in self._left_s]
        return max(0.0, max(due, default=now - self._patience_s) + self._patience_s - now)


class Batch:
    """The passes of all conversations on one model. Thread-safe, with one session per caller.

    One pass runs at a time, led by the thread that waited longest, for as many conversations as
    fit; without company a conversation makes its pass at once. active: generations being decoded.
    most: conversations that may share a pass.
    """

    def __init__(
        self,
        model: Model | None = None,
        lossless: Losslessness | None = None,
        costs: RowCosts | None = None,
        parallel_rows: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """model: None if it shares no passes. costs: of its rows, corrected by this batch alone.
        parallel_rows: limit on the rows of all conversations' rounds."""
        self.active = 0
        self.most = 1
        self._model = model if model is not None and isinstance(model, SharesPasses) else None
        self._changes_texts = False  # sharing would, by this machine's arithmetic
        self._lossless = lossless or Losslessness()
        self._widths = self._lossless.widths
        self._costs = costs or RowCosts(_UNKNOWN_COSTS, is_measured=False)
        self._parallel_rows = parallel_rows
        self._clock = clock
        self._token_s: float | None = None  # per prompt token in a shared pass
        self._slices = False  # prompts may be read in slices of SLICE_TOKENS
        self._counting = Lock()
        self._preparing: Thread | None = None
        self._prepared_for = 1  # conversations
        self._num_alone = 0  # successive passes without company
        self._turn = Condition(Lock())
        self._queue: list[_TreeRequest | _PromptRequest] = []  # oldest first
        self._is_running = False
        self._is_prompts_turn = True
        self._returns = _Returns()
        self._rests = SpacedRetries(_FIRST_REST, _LONGEST_REST)  # in passes
        self._divisible: WeakSet[Session] = WeakSet()  # the last tree may be cut

    def enter(self) -> None:
        """Count one more active generation, until `leave`."""
        with self._counting:
            self.active += 1

    def leave(self) -> None:
        with self._counting:
            self.active -= 1

    def limit(self, budget: Budget, session: Session, drafters: Sequence[Drafter]) -> Budget:
        """Return the part of a budget that others leave for a session's next round, at least one
        row."""
        most = self._most_rows(session, drafters)
        if most is None or most >= budget.num_rows:
            return budget
        num_draft_tokens = min(budget.num_draft_tokens, most - 1)
        if self._widths:  # padding may still widen a pass of its own
            return budget._replace(num_draft_tokens=num_draft_tokens, probes=False)
        return budget._replace(num_draft_tokens=num_draft_tokens, num_rows=most)

    def _most_rows(self, session: Session, drafters: Sequence[Drafter]) -> int | None:
        """Return how many rows a session's next round may have; None for any number.

        Normally an equal share, since more would wait for the next pass. More if drafting is free
        and rows of little value can be left out, sparing one row for each other conversation.
        """
        num_active, most = max(1, self.active), self._parallel_rows
        if most is not None:
            most = max(1, most // num_active)
        if num_active < 2 or self.most < 2 or self._rests.resting:
            return most
        sharing = min(num_active, self.most)
        fitting = self._widest // sharing
        drafts_free = all(each.traits.cost is not Cost.PASS for each in drafters)
        if drafts_free and session in self._divisible:
            fitting = self._widest - sharing + 1
        return max(1, fitting if most is None else min(most, fitting))

    def forward(
        self, session: Session, tree: TokenTree, num_rows: int = 0, values: Sequence[float] = ()
    ) -> Scored:
        """Score the tree's rows; with `values` (`RoundPlan`), maybe only its first rows. num_rows:
        of a pass of its own, if wider. Raises as the session's own pass does."""
        if self._is_alone():
            padded = tree.padded(num_rows)
            return Scored(session.forward(padded), len(padded))
        if len(tree) > 1:
            (self._divisible.add if values else self._divisible.discard)(session)
        # A tree cut to one row would count as a plain step, which decides near ties.
        least = 2 if self._lossless.replays else 1
        request = _TreeRequest(session, tree, num_rows, values, least)
        self._submit(request)
        assert request.scored is not None
        return request.scored._replace(charged_s=request.charged_s)

    def prefill(self, session: Session, tokens: Sequence[int]) -> None:
        """Commit tokens. Raises as the session's own `prefill` does."""
        if self._is_alone():
            session.prefill(tokens)
        elif len(tokens):
            self._submit(_PromptRequest(session, tokens))

    def _is_alone(self) -> bool:
        """Return True if a pass has no company and needs no lock or queue. Company must be missing
        for several passes: a slow reader leaves its generation for a moment."""
        if self.active > self._prepared_for:
            self.prepare_for(self.active)
        if self.most < 2:
            return True
        self._num_alone = 0 if self.active > 1 else self._num_alone + 1
        return self._num_alone > _ALONE

    def prepare_for(self, num_conversations: int) -> None:
        """Start preparing for that many conversations in another thread, once."""
        with self._counting:
            if num_conversations <= self._prepared_for:
                return
            self._prepared_for = num_conversations
            if self._model is not None and not self._changes_texts:
                asked = (num_conversations, self._preparing)
                self._preparing = Thread(target=self._prepare, args=asked, daemon=True)
                self._preparing.start()

    def settle(self) -> None:
        """Wait until nothing is being prepared."""
        with self._counting:
            preparing = self._preparing
        if preparing is not None:
            preparing.join()

    def _prepare(self, num_conversations: int, before: Thread | None) -> None:
        if before is not None:
            before.join()
        model = self._model
        if model is None or self._changes_texts:
            return
        try:
            most = model.prepare_sharing(num_conversations)
            if most > 1 and self._widths:  # another number may use another graph
                with self._turn:  # no shared pass may run meanwhile
                    self.most = 1
                    self._turn.wait_for(lambda: not self._is_running)
                if not shares_alike(model, self._widths):
                    _log.info("passes are not shared: that would change texts on this machine")
                    self._changes_texts = True
                    return
            if most > 1 and before is None:
                self._slices = not self._widths or slices_alike(model)
            self.most = most
        except Exception as error:  # whatever the library raises: continue without sharing
            _log.info("shared passes are not made ready: %s", error)

    @property
    def _widest(self) -> int:
        if self._widths:
            return self._widths[-1]
        assert self._model is not None
        return min(_ANY_ROWS, self._model.capabilities.verified_rows)

    def _submit(self, request: _TreeRequest | _PromptRequest) -> None:
        """Wait until the request is done; raise its error."""
        with self._turn:
            self._returns.arrived(request.session, self._clock())
            self._queue.append(request)
            self._turn.notify_all()  # wake a leader that waits for company
            nobody_came = False
            try:
                while not request.is_done:
                    # If the first to wake up led, passes had fewer conversations.
                    if self._is_running or self._queue[0] is not request:
                        self._turn.wait()
                    elif not nobody_came and (wait_s := self._worth_waiting_s()) > 0:
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
        if request.error is not None:
            raise request.error

    def _worth_waiting_s(self) -> float:
        """Return how long the next pass should wait for conversations that are due."""
        trees, prompts = self._waiting()
        if prompts and self._take_turns(prompts[0]) and (self._is_prompts_turn or not trees):
            return 0.0
        if len(trees) >= self.most or not all(map(self._joins, trees[:1])):
            return 0.0
        return self._returns.wait_s(self._clock())

    def _lead(self) -> None:
        """Make the next pass, releasing the lock meanwhile."""
        chosen = self._choose()
        started, pass_s = self._clock(), 0.0
        self._is_running = True
        self._turn.release()
        try:
            self._make(chosen)
            pass_s = self._clock() - started
        finally:
            self._turn.acquire()
            self._is_running = False
            now = self._clock()
            for request in self._queue:
                if request.is_done and isinstance(request, _TreeRequest):
                    self._returns.left(request.session, now, pass_s)
            self._queue = [request for request in self._queue if not request.is_done]
            self._turn.notify_all()

    def _choose(self) -> list[_TreeRequest | _PromptRequest]:
        """Choose the next pass: trees, always with the oldest one, a prompt, or both. Prompts and
        trees that cannot share a pass take turns."""
        trees, prompts = self._waiting()
        prompt = prompts[0] if prompts else None
        if prompt is not None and trees and (self._take_turns(prompt) or not self._joins(trees[0])):
            if self._is_prompts_turn:
                trees = []
            else:
                prompt = None
        self._is_prompts_turn = bool(trees)
        if prompt is not None and not trees:
            prompt.num_rows = self._own_slice(len(prompt.left), len(prompts))
            return [prompt]
        self._rests.count()
        chosen = self._deal(list(filter(self._joins, trees)), self._widest - (prompt is not None))
        if trees[0] not in chosen or (len(chosen) < 2 and prompt is None):
            trees[0].num_rows = len(trees[0].tree)
            return [trees[0]]
        if prompt is None:
            return [*chosen]
        rows = sum(each.num_rows for each in chosen)
        prompt.num_rows = min(len(prompt.left), self._slice_beside(rows))
        return [*chosen, prompt]

    def _waiting(self) -> tuple[list[_TreeRequest], list[_PromptRequest]]:
        trees = [request for request in self._queue if isinstance(request, _TreeRequest)]
        return trees, [request for request in self._queue if isinstance(request, _PromptRequest)]

    def _joins(self, request: _Request) -> bool:
        """Return True if the request may share a pass.

        Not for sessions that give features in their own passes only, plain steps that decide near
        ties, and branching trees on an empty cache, which may need an extra pass.
        """
        if self._rests.resting or request.must_be_alone or collects_alone(request.session):
            return False
        if not isinstance(request, _TreeRequest):
            return True
        is_plain = self._lossless.replays and len(request.tree) == 1
        return not is_plain and (request.session.length > 0 or request.tree.is_chain)

    def _take_turns(self, prompt: _PromptRequest) -> bool:
        """Return True if a prompt is read without other conversations' rows."""
        assert self._model is not None
        return not (
            self._model.capabilities.invariant_rows and not self._widths and self._joins(prompt)
        )

    def _deal(self, waiting: Sequence[_TreeRequest], room: int) -> list[_TreeRequest]:
        """Choose the oldest requests that fit `room` rows and divide these by value."""
        chosen: list[_TreeRequest] = []
        rows = 0
        for request in waiting:
            if len(chosen) < self.most and rows + request.wish.least <= room:
                chosen.append(request)
                rows += request.wish.least
        counts = deal_rows([request.wish for request in chosen], room, self._seconds)
        for request, num_rows in zip(chosen, counts, strict=True):
            request.num_rows = num_rows
        return chosen

    def _seconds(self, rows: int) -> float:
        return self._costs.at(wider(rows, self._widths) or rows)

    def _own_slice(self, num_left: int, num_prompts: int) -> int:
        """Return how many prompt tokens its own pass reads: all, unless others are waiting or
        decoding. Slices are of similar length: none has only a token or two."""
        if not self._slices or max(len(self._queue), self.active) <= num_prompts:
            return num_left
        return -(-num_left // -(-num_left // SLICE_TOKENS))

    def _slice_beside(self, rows: int) -> int:
        """Return how many prompt tokens double the time of a pass of these rows, if they fit.
        Others then keep half their speed. The first slices measure the cost of a token."""
        if self._token_s is None:
            return min(self._widest - rows, SLICE_TOKENS)
        fitting = int(self._costs.at(rows) / max(self._token_s, _LEAST_TOKEN_S))
        return min(self._widest - rows, max(_LEAST_SLICE, fitting))

    def _learn_slice(self, rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from a shared pass what a prompt token adds."""
        if not self._costs.is_scaled:  # these rows were never timed without a prompt
            return
        token_s = max(0.0, seconds - self._costs.at(rows)) / num_tokens
        known_s = token_s if self._token_s is None else self._token_s
        self._token_s = known_s + _SLICE_WEIGHT * (token_s - known_s)

    def _make(self, requests: Sequence[_TreeRequest | _PromptRequest]) -> None:
        """Make a pass; a single conversation's error is kept in its request."""
        if len(requests) > 1:
            self._make_together(requests)
            return
        [request] = requests
        started = self._clock()
        with request.keeping_error():
            rows = request.run()
            if isinstance(request, _TreeRequest):
                request.charged_s = self._clock() - started
                self._costs.observe(rows, request.charged_s)

    def _make_together(self, requests: Sequence[_TreeRequest | _PromptRequest]) -> None:
        """Make a shared pass. If it fails, each conversation makes its own."""
        parts = [request.part() for request in requests]
        rows = [len(part.tree) for part in parts]
        width = wider(sum(rows), self._widths)
        assert width is not None and self._model is not None
        started = self._clock()
        try:
            outs = self._model.forward_together(parts, width)
        except Exception as error:
            _log.info("a pass of several conversations failed, each is made alone: %s", error)
            for request in requests:
                request.must_be_alone = True
            self._rests.rest()
            return
        seconds = self._clock() - started
        self._rests.reset()
        if isinstance(requests[-1], _PromptRequest):
            self._learn_slice(sum(rows[:-1]), rows[-1], seconds)
        else:
            self._costs.observe(width, seconds)
        charges = charge(self._costs, rows, seconds)
        for request, out, count, charged_s in zip(requests, outs, rows, charges, strict=True):
            if isinstance(request, _TreeRequest):
                request.charged_s = charged_s
                request.finish(out, count, len(requests))
            else:
                with request.keeping_error():
                    request.finish(count)

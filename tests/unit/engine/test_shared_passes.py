"""Who shares a pass with whom, and what happens where that fails; on the exact model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from edge_spec.control.concurrency import Concurrency
from edge_spec.core.model import Forward, Session
from edge_spec.core.shared_pass import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.engine.pass_requests import TreeRequest
from edge_spec.engine.shared_passes import SharedPasses
from edge_spec.errors import SessionError
from edge_spec.exactness.lossless import LosslessMode, Losslessness
from edge_spec.exactness.sharing import Sharing
from edge_spec.testing import ScriptedModel, random_logits

VOCAB = 50
TIMEOUT_S = 60  # a test that hangs fails


class Recording(ScriptedModel):
    """Notes the rows of each pass by session, and whether they were scored; `held` makes the next
    shared or own pass wait."""

    def __init__(self) -> None:
        super().__init__(random_logits(VOCAB), VOCAB)
        self.passes: list[list[tuple[int, bool]]] = []
        self.widths: list[int] = []
        self.held: Event | None = None
        self.running = Event()
        self.fails: Exception | None = None

    def open_session(self) -> Any:
        session = super().open_session()
        forward, prefill = session.forward, session.prefill

        def watched(tree: TokenTree) -> Forward:
            self.note([(len(tree), True)], len(tree))
            return forward(tree)

        def watched_prefill(tokens: Sequence[int]) -> None:
            self.note([(len(tokens), False)], len(tokens))
            prefill(tokens)

        session.scripted_forward = forward
        session.forward, session.prefill = watched, watched_prefill
        return session

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        self.note([(len(part.tree), part.scored) for part in parts], num_rows)
        if self.fails is not None:
            raise self.fails
        return [part.session.scripted_forward(part.tree) for part in parts]  # type: ignore[attr-defined]

    def note(self, rows: list[tuple[int, bool]], width: int) -> None:
        self.passes.append(rows)
        self.widths.append(width)
        held, self.held = self.held, None
        self.running.set()
        if held is not None:
            assert held.wait(TIMEOUT_S)


class Served:
    """Shared passes that are ready, and clients that ask in threads of their own."""

    def __init__(self, lossless: Losslessness | None = None, prepared: int = 4) -> None:
        self.model = Recording()
        self.passes = SharedPasses(self.model, lossless or Losslessness(), Concurrency())
        self.passes.prepare_for(prepared)
        self.passes.settle()
        self.model.passes.clear()
        self.model.widths.clear()
        self.threads: list[Thread] = []
        self.found: dict[str, Any] = {}
        self.is_held = False

    def session(self, held: int = 3) -> Session:
        session: Session = self.model.open_session()
        session.committed += range(held)  # type: ignore[attr-defined]
        return session

    def ask(
        self,
        name: str,
        session: Session,
        rows: int,
        width: int = 0,
        values: Sequence[float] = (),
    ) -> None:
        tree = TokenTree.chain(rows, range(1, rows))
        self._start(name, lambda: self.passes.forward(session, tree, width, values))

    def read(self, name: str, session: Session, count: int) -> None:
        self._start(name, lambda: self.passes.prefill(session, list(range(count))))

    def _start(self, name: str, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.found[name] = call()
            except BaseException as error:
                self.found[name] = error

        thread = Thread(target=run)
        self.threads.append(thread)
        with self.passes._turn:
            waiting = len(self.passes._queue)
        thread.start()
        if self.is_held:  # it can only queue
            with self.passes._turn:
                assert self.passes._turn.wait_for(
                    lambda: len(self.passes._queue) > waiting, TIMEOUT_S
                )

    def hold(self) -> Event:
        """The pass of a conversation of its own runs from now on until the event is set."""
        self.model.held = released = Event()
        self.model.running.clear()
        self.ask("held", self.session(), 1)
        assert self.model.running.wait(TIMEOUT_S)
        self.is_held = True
        return released

    def end(self) -> list[list[tuple[int, bool]]]:
        """Returns the passes after the one that was held."""
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        return self.model.passes[1:]


def logits(session: Session, rows: int) -> np.ndarray:
    tree = TokenTree.chain(rows, range(1, rows))
    return session.scripted_forward(tree).logits  # type: ignore[attr-defined, no-any-return]


def test_who_comes_during_a_pass_shares_the_next_one() -> None:
    served = Served()
    sessions = [served.session(held) for held in (3, 4, 5)]
    released = served.hold()
    for name, session, rows in zip("abc", sessions, (1, 3, 2), strict=True):
        served.ask(name, session, rows)
    released.set()
    assert served.end() == [[(1, True), (3, True), (2, True)]]
    for name, session, rows in zip("abc", sessions, (1, 3, 2), strict=True):
        out, num_rows, charged_s, num_sharing, _ = served.found[name]
        assert num_rows == rows and charged_s > 0 and num_sharing == 3
        assert np.array_equal(out.logits, logits(session, rows))


def test_no_more_than_fit_and_the_oldest_first() -> None:
    served = Served(prepared=2)
    served.passes._setup.most = 2
    released = served.hold()
    for name in "abcde":
        served.ask(name, served.session(), 2)
    released.set()
    assert [len(each) for each in served.end()] == [2, 2, 1]


def test_passes_keep_to_widths_whose_rows_agree() -> None:
    """And a conversation's own pass is widened where it is alone."""
    lossless = Losslessness(LosslessMode.AUTO, widths=(2, 4, 6))
    served = Served(lossless)
    released = served.hold()
    for name, rows in (("a", 1), ("b", 2), ("c", 4)):
        served.ask(name, served.session(), rows, width=2)
    released.set()
    passes = served.end()
    assert passes == [[(1, True), (2, True)], [(4, True)]]
    assert served.model.widths[1:] == [4, 4]


LIKELY, UNLIKELY = (1.0, 0.9, 0.8, 0.7), (1.0, 0.3, 0.2, 0.1)


def test_the_rows_of_a_pass_go_where_they_are_likely_to_be_right() -> None:
    """And each conversation is told which of its rows were scored."""
    lossless = Losslessness(LosslessMode.AUTO, widths=tuple(range(1, 7)))
    served = Served(lossless)
    sessions = [served.session(held) for held in (3, 4)]
    released = served.hold()
    served.ask("unlikely", sessions[0], 4, values=UNLIKELY)
    served.ask("likely", sessions[1], 4, values=LIKELY)
    released.set()
    assert served.end() == [[(2, True), (4, True)]]  # 6 rows fit
    for name, session, rows in zip(("unlikely", "likely"), sessions, (2, 4), strict=True):
        scored = served.found[name]
        assert scored.num_rows == len(scored.tree) == rows
        assert np.array_equal(scored.out.logits, logits(session, 4)[:rows])


@pytest.mark.parametrize("row_s, counts", [(1e-4, [4, 4]), (4e-3, [1, 4]), (0.1, [1, 1])])
def test_rows_that_do_not_pay_for_everybodys_time_are_not_scored(
    row_s: float, counts: list[int]
) -> None:
    served = Served()
    released = served.hold()
    times = served.passes._times.all
    for rows in (2, 4, 8) * 40:
        times.observe(rows, 8e-3 + rows * row_s)
    served.ask("unlikely", served.session(), 4, values=UNLIKELY)
    served.ask("likely", served.session(), 4, values=LIKELY)
    with served.passes._turn:
        asked = served.passes._fitting()
        found = [request.num_rows for request in asked]
    released.set()
    served.end()
    assert found == counts


def test_a_conversation_that_is_left_alone_has_all_its_rows_scored() -> None:
    """After a pass that failed, in which it had fewer."""
    served = Served(Losslessness(LosslessMode.AUTO, widths=tuple(range(1, 7))))
    served.model.fails = SessionError("lost", remedy="Ask again.")
    released = served.hold()
    served.ask("a", served.session(), 4, values=UNLIKELY)
    served.ask("b", served.session(), 4, values=LIKELY)
    released.set()
    assert served.end() == [[(2, True), (4, True)], [(4, True)], [(4, True)]]
    assert len(served.found["a"].out.logits) == len(served.found["b"].out.logits) == 4


def test_where_near_ties_are_replayed_no_draft_is_cut_to_a_plain_row() -> None:
    """Which would be believed at a near tie."""
    lossless = Losslessness(LosslessMode.AUTO, replays=True, tie_margin=0.1)
    served = Served(lossless)
    served.passes._times.all.observe(1, 0.1)
    served.passes._times.all.observe(8, 9.0)
    released = served.hold()
    for name in "ab":
        served.ask(name, served.session(), 4, values=UNLIKELY)
    released.set()
    assert served.end() == [[(2, True), (2, True)]]


def test_a_near_tie_is_decided_in_a_pass_of_its_own() -> None:
    served = Served(Losslessness(LosslessMode.AUTO, replays=True, tie_margin=0.1))
    released = served.hold()
    for name, rows in (("a", 1), ("b", 2), ("c", 3)):
        served.ask(name, served.session(), rows)
    released.set()
    assert served.end() == [[(1, True)], [(2, True), (3, True)]]


def test_a_failure_of_a_shared_pass_is_nobodys_failure() -> None:
    served = Served()
    served.model.fails = SessionError("lost", remedy="Ask again.")
    released = served.hold()
    for name in "ab":
        served.ask(name, served.session(), 2)
    released.set()
    assert served.end() == [[(2, True), (2, True)], [(2, True)], [(2, True)]]
    assert len(served.found["a"].out.logits) == len(served.found["b"].out.logits) == 2


def test_who_fails_alone_is_told_and_the_others_go_on() -> None:
    served = Served()
    served.model.fails = SessionError("lost", remedy="Ask again.")
    broken, whole = served.session(), served.session()
    broken.forward = fails  # type: ignore[method-assign]
    released = served.hold()
    served.ask("broken", broken, 2)
    served.ask("whole", whole, 2)
    released.set()
    served.end()
    assert isinstance(served.found["broken"], SessionError)
    assert np.array_equal(served.found["whole"].out.logits, logits(whole, 2))


def fails(tree: TokenTree) -> Forward:
    raise SessionError("gone", remedy="Ask again.")


def test_a_prompt_is_read_in_slices_beside_the_rows_of_others() -> None:
    served = Served()
    prompt, other = served.session(0), served.session()
    served.passes._times.all.fixed_s, served.passes._times.all.row_s = 4e-3, 1e-3
    released = served.hold()
    served.read("prompt", prompt, 100)
    served.ask("other", other, 2)
    released.set()
    passes = served.end()
    assert passes[0][0] == (2, True) and not passes[0][1][1]
    assert 4 <= passes[0][1][0] <= 32  # a slice, so that nobody waits for the whole
    assert sum(rows for each in passes for rows, scored in each if not scored) == 100
    assert prompt.committed == list(range(100))  # type: ignore[attr-defined]


def test_who_cannot_keep_its_slice_is_told_and_the_others_go_on() -> None:
    served = Served()
    served.passes._times.all.fixed_s, served.passes._times.all.row_s = 4e-3, 1e-3
    broken, whole = served.session(0), served.session()
    broken.commit = fails  # type: ignore[method-assign, assignment]
    released = served.hold()
    served.ask("whole", whole, 2)
    served.read("broken", broken, 100)
    released.set()
    assert len(served.end()[0]) == 2  # one pass of both
    assert isinstance(served.found["broken"], SessionError)
    assert np.array_equal(served.found["whole"].out.logits, logits(whole, 2))


def test_a_wide_tree_does_not_wait_for_the_end_of_a_prompt() -> None:
    """Beside whose slices it has no room."""
    served = Served()
    served.passes._times.all.fixed_s, served.passes._times.all.row_s = 4e-3, 1e-3
    released = served.hold()
    served.read("prompt", served.session(0), 400)
    served.ask("narrow", served.session(), 1)
    served.ask("wide", served.session(), 30)
    released.set()
    passes = served.end()
    assert any((30, True) in each for each in passes[:3])


def test_prompts_that_slices_would_change_are_read_as_a_whole() -> None:
    served = Served()
    served.passes._setup.sharing = Sharing((), slices=False)
    released = served.hold()
    served.read("prompt", served.session(0), 100)
    served.ask("other", served.session(), 2)
    released.set()
    assert served.end() == [[(100, False)], [(2, True)]]


def test_a_tree_on_an_empty_cache_is_scored_alone() -> None:
    served = Served()
    session = served.session(0)
    tree = TokenTree(
        np.array([1, 2, 3], np.int32), np.array([-1, 0, 0], np.int32), np.ones(3, np.float32)
    )
    released = served.hold()
    served._start("tree", lambda: served.passes.forward(session, tree, 0))
    served.ask("other", served.session(), 1)
    released.set()
    assert served.end() == [[(3, True)], [(1, True)]]


def test_what_changes_a_bit_is_not_shared() -> None:
    class Noisy(Recording):
        def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
            outs = super().forward_together(parts, num_rows)
            return [Forward(np.nextafter(out.logits, np.float32(9e9))) for out in outs]

    lossless = Losslessness(LosslessMode.AUTO, widths=(1, 2, 4, 8, 16))
    for kind, most in ((Recording, 2), (Noisy, 1)):
        passes = SharedPasses(kind(), lossless, Concurrency())
        passes.prepare_for(2)
        passes.settle()
        assert passes.most == most


@pytest.mark.parametrize("agree, rows_each", [(True, 4), (False, 2)])
def test_wider_passes_are_looked_for_where_rounds_fill_them(agree: bool, rows_each: int) -> None:
    """And shared only where their rows agree with those of a conversation's own passes."""

    class Wide(Recording):
        def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
            assert passes._is_running  # or others could have a pass meanwhile
            return super().forward_together(parts, num_rows)

        def open_session(self) -> Any:
            session = super().open_session()
            forward = session.forward

            def other_kernel(tree: TokenTree) -> Forward:
                out = forward(tree)
                noisy = len(tree) > 16 and not agree
                return Forward(np.nextafter(out.logits, np.float32(9e9))) if noisy else out

            session.forward = other_kernel
            return session

    load = Concurrency()
    passes = SharedPasses(Wide(), Losslessness(LosslessMode.AUTO, widths=tuple(range(1, 17))), load)
    passes.prepare_for(8)
    passes.settle()
    load.active = 8
    assert load.rows_each() == 2
    session = passes._model.open_session()
    session.prefill([1, 2, 3])
    for _ in range(20):
        passes.forward(session, TokenTree.chain(1, [2]), 0)
        session.rollback(3)
    passes.settle()
    assert load.rows_each() == rows_each


def test_a_pass_of_the_setup_waits_for_its_turn() -> None:
    """A model makes one shared pass at a time."""
    served = Served()
    released, waits = served.hold(), Event()
    wait = served.passes._turn.wait
    parts = [PassPart(served.session(), TokenTree.chain(1))]

    def told(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    served.passes._turn.wait = told  # type: ignore[method-assign]
    asking = Thread(target=lambda: served.passes._together(parts, 1))
    asking.start()
    assert waits.wait(TIMEOUT_S)
    assert len(served.model.passes) == 1  # the one that is held
    released.set()
    asking.join(TIMEOUT_S)
    assert len(served.model.passes) == 2
    served.end()


def test_rows_are_limited_only_where_passes_are_shared() -> None:
    served = Served()
    load = served.passes._load
    load.active = 4
    assert load.rows_each() == 64 // 4
    served.passes._times.rest()
    assert load.rows_each() is None
    assert SharedPasses(Recording(), Losslessness(), load).most == 1
    assert load.rows_each() is None


def test_an_interrupt_takes_a_request_back() -> None:
    """Ctrl-C while another conversation's pass runs: nothing is left in the queue."""
    served = Served()
    released = served.hold()
    wait = served.passes._turn.wait
    raised: list[bool] = []

    def interrupted(timeout: float | None = None) -> bool:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        released.set()
        return wait(timeout)

    served.passes._turn.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        served.passes.forward(served.session(), TokenTree.chain(1), 0)
    assert not served.passes._queue
    assert served.end() == []


@pytest.mark.parametrize("due_s, waits", [(1e-3, True), (9e-3, False)])
def test_nobody_waits_longer_than_it_wins(due_s: float, waits: bool) -> None:
    """For a conversation that comes due_s after its last pass, where a pass less saves 4 ms."""
    now = [0.0]
    served = Served()
    passes = served.passes
    passes._clock = lambda: now[0]
    passes._times.all.fixed_s, passes._times.all.row_s = 4e-3, 1e-3
    other = served.session()
    arrivals = passes._arrivals_of(other)
    for _ in range(8):
        arrivals.left(now[0])
        now[0] += due_s
        arrivals.arrived(now[0])
    arrivals.left(now[0])
    with passes._turn:
        request = TreeRequest(served.session(), TokenTree.chain(1), 0)
        request.ready_s = now[0]
        passes._queue.append(request)
        waited_s = passes._worth_waiting_s()
        assert (waited_s > 0) == waits and waited_s <= 4e-3
        now[0] += 5e-3  # it has not come
        assert passes._worth_waiting_s() == 0


def test_prompts_alone_are_read_one_after_the_other_in_large_parts() -> None:
    """Where nobody writes: who comes then waits for a part at most."""
    served = Served()
    released = served.hold()
    for name in "ab":
        served.read(name, served.session(0), 600)
    released.set()
    passes = served.end()
    whole = [[(256, False)], [(256, False)], [(88, False)]]
    assert passes == whole * 2

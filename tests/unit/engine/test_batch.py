"""Who shares a pass with whom, and what happens where that fails; on the exact model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward, Session
from edge_spec.core.modes import LosslessMode
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Cost, Drafter, DrafterTraits
from edge_spec.engine.batch import Batch, _PromptRequest, _Returns, _TreeRequest
from edge_spec.errors import SessionError
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.dealing import charge
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.testing import ScriptedModel, random_logits

VOCAB = 50
TIMEOUT_S = 60  # a test that hangs fails
BUDGET = Budget(15, 16)
LOST = SessionError("lost", remedy="Ask again.")


class Recording(ScriptedModel):
    """Notes the rows of each pass by session, negative ones of prompts; `held` makes the next pass
    wait. Each takes what `costs` says of its rows, on a clock of its own."""

    def __init__(self, costs: Callable[[int], float] = lambda rows: 8e-3 + rows * 1e-4) -> None:
        super().__init__(random_logits(VOCAB), VOCAB)
        self.costs = costs
        self.now = 0.0
        self.passes: list[list[int]] = []
        self.widths: list[int] = []
        self.held: Event | None = None
        self.running = Event()
        self.fails: Exception | None = None

    def open_session(self) -> Any:
        session = super().open_session()
        forward, prefill = session.forward, session.prefill

        def noted_forward(tree: TokenTree) -> Forward:
            self.note([len(tree)], len(tree))
            return forward(tree)

        def noted_prefill(tokens: Sequence[int]) -> None:
            self.note([-len(tokens)], len(tokens))
            prefill(tokens)

        session.scripted_forward = forward
        session.forward, session.prefill = noted_forward, noted_prefill
        return session

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        self.note([len(part.tree) for part in parts], num_rows)
        if self.fails is not None:
            raise self.fails
        return [part.session.scripted_forward(part.tree) for part in parts]  # type: ignore[attr-defined]

    def note(self, rows: list[int], width: int) -> None:
        self.passes.append(rows)
        self.widths.append(width)
        self.now += self.costs(width)
        held, self.held = self.held, None
        self.running.set()
        if held is not None:
            assert held.wait(TIMEOUT_S)


class Served:
    """A batch that is ready, and clients that ask in threads of their own."""

    def __init__(
        self,
        lossless: Losslessness | None = None,
        prepared: int = 4,
        model: Recording | None = None,
        active: int = 2,
        costs: RowCosts | None = None,
    ) -> None:
        self.model = model or Recording()
        known = costs or RowCosts({rows: self.model.costs(rows) for rows in (1, 2, 4, 8)})
        self.batch = Batch(self.model, lossless, known, clock=lambda: self.model.now)
        self.batch.active = active
        self.batch.prepare_for(prepared)
        self.batch.settle()
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
        tree: TokenTree | int,
        width: int = 0,
        values: Sequence[float] = (),
    ) -> None:
        asked = chain(tree) if isinstance(tree, int) else tree
        self.start(name, lambda: self.batch.forward(session, asked, width, values))

    def read(self, name: str, session: Session, count: int) -> None:
        self.start(name, lambda: self.batch.prefill(session, list(range(count))))

    def start(self, name: str, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.found[name] = call()
            except BaseException as error:
                self.found[name] = error

        thread = Thread(target=run)
        self.threads.append(thread)
        queue = self.batch._queue
        waiting = len(queue)
        thread.start()
        if self.is_held:  # it can only queue
            with self.batch._turn:
                assert self.batch._turn.wait_for(lambda: len(queue) > waiting, TIMEOUT_S)

    def hold(self) -> Event:
        """Returns an event until which the pass of a conversation of its own runs."""
        self.model.held = released = Event()
        self.model.running.clear()
        self.ask("held", self.session(), 1)
        assert self.model.running.wait(TIMEOUT_S)
        self.is_held = True
        return released

    def end(self) -> list[list[int]]:
        """Returns the passes after the one that was held."""
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        self.is_held = False
        return self.model.passes[1:]


def chain(rows: int) -> TokenTree:
    return TokenTree.chain(rows, range(1, rows))


def logits(session: Session, rows: int) -> np.ndarray:
    return session.scripted_forward(chain(rows)).logits  # type: ignore[attr-defined, no-any-return]


def fails(*_: object) -> Forward:
    raise SessionError("gone", remedy="Ask again.")


def exact(*widths: int, replays: bool = False) -> Losslessness:
    margin = 0.1 if replays else 0.0
    return Losslessness(LosslessMode.AUTO, widths=widths, replays=replays, tie_margin=margin)


LIKELY, UNLIKELY = (1.0, 0.9, 0.8, 0.7), (1.0, 0.3, 0.2, 0.1)
WIDE = [(rows, ()) for rows in (2, 2, 2, 2, 2)]

SHARED: dict[str, tuple[Losslessness, Sequence[tuple[int, Sequence[float]]], list[list[int]]]] = {
    "who comes during a pass shares the next": (
        exact(), [(1, ()), (3, ()), (2, ())], [[1, 3, 2]],
    ),
    "no more than may, the oldest first": (exact(), WIDE, [[2, 2, 2, 2], [2]]),
    "no more rows than agree": (
        exact(2, 4, 6), [(1, ()), (2, ()), (4, ())], [[1, 2], [4]],
    ),
    "rows go where they are likely": (
        exact(*range(1, 7)), [(4, UNLIKELY), (4, LIKELY)], [[2, 4]],
    ),
    "no draft is cut to a row that would decide a near tie": (
        exact(replays=True), [(4, UNLIKELY)] * 16, [[4] * 4] * 4,
    ),
    "a near tie is decided alone": (
        exact(replays=True), [(1, ()), (2, ()), (3, ())], [[1], [2, 3]],
    ),
    "a tree that fits no shared pass goes alone": (
        exact(1, 2, 3, 4), [(5, ()), (1, ()), (2, ())], [[5], [1, 2]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_each_gets_the_scores_of_its_own_pass(case: str) -> None:
    lossless, asked, expected = SHARED[case]
    served = Served(lossless)
    sessions = [served.session(held) for held, _ in enumerate(asked, start=3)]
    released = served.hold()
    for at, (session, (rows, values)) in enumerate(zip(sessions, asked, strict=True)):
        served.ask(str(at), session, rows, values=values)
    released.set()
    passes = served.end()
    assert passes == expected
    counts = [(rows, len(each)) for each in passes for rows in each]
    found = [served.found[str(at)] for at in range(len(asked))]
    spent_s = sum(map(served.model.costs, served.model.widths[1:]))
    assert sum(each.charged_s for each in found) == pytest.approx(spent_s)
    assert sorted((each.num_rows, each.num_sharing) for each in found) == sorted(counts)
    for session, scored, (rows, _) in zip(sessions, found, asked, strict=True):
        assert scored.charged_s > 0
        assert np.array_equal(scored.out.logits, logits(session, rows)[: scored.num_rows])


@pytest.mark.parametrize(
    "row_s, replays, counts",
    [(1e-4, False, [4, 4]), (4e-3, False, [1, 4]), (0.1, False, [1, 1]), (0.1, True, [2, 3])],
)
def test_rows_that_do_not_pay_for_everybodys_time_are_not_scored(
    row_s: float, replays: bool, counts: list[int]
) -> None:
    served = Served(exact(replays=replays), model=Recording(lambda rows: 8e-3 + rows * row_s))
    for rows in (2, 4, 8) * 40:  # what passes take is learnt from those before
        served.batch.forward(served.session(), chain(rows), 0)
    served.model.passes.clear()
    released = served.hold()
    served.ask("unlikely", served.session(), 4, values=UNLIKELY)
    served.ask("likely", served.session(), 4, values=LIKELY)
    released.set()
    assert served.end() == [counts]


def test_what_rows_cost_is_learnt_from_shared_passes() -> None:
    """Also where another machine's table had them for nothing."""
    dear = Recording(lambda rows: 8e-3 + rows * 0.1)
    served = Served(model=dear, costs=RowCosts({1: 0.1, 16: 0.1001}))
    for _ in range(12):
        released = served.hold()
        served.ask("unlikely", served.session(), 4, values=UNLIKELY)
        served.ask("likely", served.session(), 4, values=LIKELY)
        released.set()
        served.end()
        served.threads.clear()
    shared = [each for each in dear.passes if len(each) == 2]
    assert shared[0] == [4, 4] and sum(shared[-1]) < 4


def test_a_failure_of_a_shared_pass_is_nobodys_failure() -> None:
    """All rows of each are scored alone, also where fewer were in the pass that failed."""
    served = Served(exact(*range(1, 7)))
    served.model.fails = LOST
    released = served.hold()
    served.ask("a", served.session(), 4, values=UNLIKELY)
    served.ask("b", served.session(), 4, values=LIKELY)
    released.set()
    assert served.end() == [[2, 4], [4], [4]]
    assert len(served.found["a"].out.logits) == len(served.found["b"].out.logits) == 4


@pytest.mark.parametrize("method", ["forward", "prefill"])
def test_who_fails_alone_is_told_and_the_others_go_on(method: str) -> None:
    served = Served()
    served.model.fails = LOST
    broken, whole = served.session(), served.session()
    setattr(broken, method, fails)
    released = served.hold()
    if method == "prefill":
        served.read("broken", broken, 100)
    else:
        served.ask("broken", broken, 2)
    served.ask("whole", whole, 2)
    released.set()
    served.end()
    assert isinstance(served.found["broken"], SessionError)
    assert np.array_equal(served.found["whole"].out.logits, logits(whole, 2))


class Invariant(Recording):
    """Promises what lets prompts be read beside the rows of others."""

    def __init__(self, row_s: float = 1e-4) -> None:
        super().__init__(lambda rows: 8e-3 + rows * row_s)
        self.capabilities = replace(self.capabilities, invariant_rows=True)


@pytest.mark.parametrize(
    "shares, passes",
    [(True, [[3, 4, 32], [-26], [-26], [-26]]), (False, [[-28], [3], [-28], [4], [-27], [-27]])],
)
def test_who_collects_features_joins_where_shared_passes_give_them(
    shares: bool, passes: list[list[int]]
) -> None:
    served = Served(model=Invariant())
    sessions: list[Any] = [served.session(held) for held in (0, 4, 5)]
    for each in sessions[:2]:
        each.collects, each.shares_features, each.collect_features = True, shares, fails
    released = served.hold()
    served.read("prompt", sessions[0], 110)
    served.ask("a", sessions[1], 3)
    served.ask("b", sessions[2], 4)
    released.set()
    assert served.end() == passes


@pytest.mark.parametrize("row_s, count", [(1e-4, 60), (3e-4, 30), (8e-3, 8)])
def test_a_slice_of_a_prompt_makes_a_pass_of_others_twice_as_long(row_s: float, count: int) -> None:
    """At most: as far as there is room; 8 tokens in any case. The first slice tells what a token
    takes."""
    served = Served(model=Invariant(row_s))
    for expected in ([4, 32], [4, count]):
        released = served.hold()
        served.read("prompt", served.session(0), 200)
        served.ask("a", served.session(), 4)
        released.set()
        assert served.end()[0] == expected
        served.model.passes.clear()


def test_sharing_rests_after_it_has_failed() -> None:
    """For as long again where it has worked in between."""
    served = Served()
    shared = []
    for number in range(48):
        served.model.fails = LOST if number in (0, 23) else None
        released = served.hold()
        served.ask("a", served.session(), 1)
        served.ask("b", served.session(), 1)
        released.set()
        shared += [number for each in served.end() if len(each) > 1]
        served.model.passes.clear()
        served.threads.clear()
        if number == 0:
            assert served.batch.limit(BUDGET, served.session(), []) is BUDGET
    assert shared == [0, 21, 22, 23, 44, 45, 46, 47]  # else three passes, in which nobody shared


def test_a_pass_waits_for_those_that_came_back_in_time_before() -> None:
    """Half as long as the last pass took."""
    returns, (a, b) = _Returns(), (Recording().open_session() for _ in range(2))
    assert returns.wait_s(0.0) == 0.0
    for each in (a, b):
        returns.left(each, 1.0, pass_s=0.2)
    returns.arrived(a, 1.05)
    assert returns.wait_s(1.05) == 0.0  # nothing is known of b
    returns.arrived(b, 1.06)
    for each in (a, b):
        returns.left(each, 2.0, pass_s=0.2)
    returns.arrived(a, 2.01)
    assert returns.wait_s(2.02) == pytest.approx(0.08)
    assert returns.wait_s(2.2) == 0.0
    returns.arrived(b, 2.3)  # too late: it is not waited for the next time
    for each in (a, b):
        returns.left(each, 3.0, pass_s=0.2)
    returns.arrived(a, 3.01)
    assert returns.wait_s(3.02) == 0.0


def test_a_conversation_that_is_due_is_in_the_next_pass() -> None:
    served = Served()
    a, b = served.session(), served.session()
    for session in (a, b):
        served.batch._returns.left(session, served.model.now, 2000.0)
        served.batch._returns.arrived(session, served.model.now)
    for session in (a, b):
        served.batch._returns.left(session, served.model.now, 2000.0)
    served.ask("a", a, 2)
    with served.batch._turn:
        assert served.batch._turn.wait_for(lambda: served.batch._queue, TIMEOUT_S)
    time.sleep(0.02)
    served.ask("b", b, 3)
    served.end()
    assert served.model.passes == [[2, 3]]


@pytest.mark.parametrize("rows", [[1, 1], [1, 3], [4, 2, 8]])
def test_a_shared_pass_is_charged_by_rows_beside_what_all_have_in_common(rows: list[int]) -> None:
    costs = RowCosts({each: 8e-3 + each * 1e-3 for each in (1, 2, 4, 8, 16)})
    charged = charge(costs, rows, 2 * costs.at(sum(rows)))
    expected = [2 * (8e-3 / len(rows) + each * 1e-3) for each in rows]
    assert charged == pytest.approx(expected)


def test_more_conversations_share_passes_only_once_theirs_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph for more of them is another graph. Meanwhile each makes its own passes."""
    compared = []

    def shares_alike(model: Any, widths: Sequence[int]) -> bool:
        compared.append(served.batch.most if compared else None)
        return len(compared) < 3

    monkeypatch.setattr("edge_spec.engine.batch.shares_alike", shares_alike)
    monkeypatch.setattr("edge_spec.engine.batch.slices_alike", lambda model: True)
    served: Served
    served = Served(exact(1, 2, 4), prepared=1)
    most = []
    for count in (2, 3, 4):
        served.batch.prepare_for(count)
        served.batch.settle()
        most.append(served.batch.most)
    assert (most, compared) == ([2, 3, 1], [None, 1, 1])
    served.batch.prepare_for(5)
    served.batch.settle()
    assert len(compared) == 3
    # Who was waiting for a shared pass by then makes a pass of its own.
    tree = _TreeRequest(served.session(), chain(2), 0, (), 1)
    prompt = _PromptRequest(served.session(0), range(9))
    for name, request in (("tree", tree), ("prompt", prompt)):
        served.start(name, partial(served.batch._submit, request))
    served.end()
    assert served.found == {"tree": None, "prompt": None}
    assert sorted(served.model.passes) == [[-9], [2]]


def test_a_conversation_without_company_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    monkeypatch.setattr(served.batch, "_turn", None)  # of a lock or a queue nothing is seen
    with pytest.raises(TypeError):
        served.batch.forward(served.session(), chain(2))
    served.batch.active = 1
    for _ in range(4):  # others may be about to come back
        with pytest.raises(TypeError):
            served.batch.prefill(served.session(), [1])
    served.batch.prefill(served.session(), [1])
    assert served.batch.forward(served.session(), chain(2)).charged_s is None
    assert served.model.passes == [[-1], [2]]


class Drafting(Drafter):
    """Is asked for nothing but its traits."""

    def __init__(self, cost: Cost) -> None:
        self.traits = DrafterTraits(cost=cost)


@pytest.mark.parametrize(
    "cost, values, rows", [(Cost.LOOKUP, (), 4), (Cost.LOOKUP, LIKELY, 13), (Cost.PASS, LIKELY, 4)]
)
def test_a_round_has_its_part_of_a_pass_and_more_of_what_can_be_left_out(
    cost: Cost, values: Sequence[float], rows: int
) -> None:
    served = Served(exact(*range(1, 17)), active=4)
    asked = served.session()
    served.batch.forward(asked, chain(4), values=values)
    limited = served.batch.limit(BUDGET, asked, [Drafting(cost)])
    assert (limited.num_draft_tokens, limited.num_rows) == (rows - 1, 16)
    assert not limited.probes  # rows beside the chain would be cut from it
    served.batch.active = 1
    assert served.batch.limit(BUDGET, asked, [Drafting(cost)]) is BUDGET


@pytest.mark.parametrize("active, rows", [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_rows_that_are_limited_are_divided_without_sharing_passes(active: int, rows: int) -> None:
    batch = Batch(parallel_rows=6)
    batch.active = active
    limited = batch.limit(BUDGET, Recording().open_session(), [])
    assert (limited.num_draft_tokens, limited.num_rows) == (rows - 1, rows)


@pytest.mark.parametrize("slices_agree", [True, False])
def test_prompts_are_divided_only_where_that_changes_no_bit(slices_agree: bool) -> None:
    """While another conversation is at work between two passes."""

    class Kept(Recording):
        """What its cache holds depends on the passes that wrote it, if slices do not agree."""

        def open_session(self) -> Any:
            session = super().open_session()
            prefill, sizes = session.prefill, []

            def noted(tokens: Sequence[int]) -> None:
                sizes.append(len(tokens))
                prefill(tokens)

            def state() -> dict[str, np.ndarray]:
                return {"sizes": np.array([sum(sizes)] if slices_agree else sizes)}

            session.prefill, session.state = noted, state
            return session

    served = Served(exact(1, 2, 4, 8, 16), model=Kept())
    served.batch.enter()
    served.batch.prefill(served.session(0), list(range(70)))
    assert served.model.passes == ([[-24], [-23], [-23]] if slices_agree else [[-70]])


@pytest.mark.parametrize("is_noisy", [False, True])
def test_what_changes_a_bit_is_not_shared(is_noisy: bool) -> None:
    class Noisy(Recording):
        def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
            outs = super().forward_together(parts, num_rows)
            return [Forward(np.nextafter(out.logits, np.float32(9e9))) for out in outs]

    served = Served(exact(1, 2, 4, 8, 16), model=Noisy() if is_noisy else Recording())
    assert served.batch.most == (1 if is_noisy else 4)


def test_an_interrupt_takes_a_request_back() -> None:
    """Ctrl-C while another conversation's pass runs: nothing is left in the queue."""
    served = Served()
    released = served.hold()
    with interrupted_while_it_waits(served.batch, released), pytest.raises(KeyboardInterrupt):
        served.batch.forward(served.session(), TokenTree.chain(1), 0)
    assert served.end() == []
    assert not served.batch._queue


@contextmanager
def interrupted_while_it_waits(batch: Batch, released: Event) -> Any:
    wait, raised = batch._turn.wait, []

    def interrupted(timeout: float | None = None) -> bool:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt
        released.set()
        return wait(timeout)

    batch._turn.wait = interrupted  # type: ignore[method-assign]
    yield

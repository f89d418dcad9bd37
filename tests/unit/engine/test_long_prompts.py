"""A prompt of 4,000 tokens among conversations that write: what it takes from them, on a clock that
only passes move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

from edge_spec.control.concurrency import Concurrency
from edge_spec.core.model import Forward, Session
from edge_spec.core.shared_pass import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.engine.shared_passes import SharedPasses
from edge_spec.exactness.lossless import Losslessness
from edge_spec.testing import ScriptedModel, random_logits

VOCAB, LONG = 50, 4000
FIXED_S, ROW_S, TOKEN_S = 8e-3, 1e-3, 3e-4  # of a pass, a scored row, a token of a prompt
TICK_S = 1e-6  # whoever looks at the clock: nobody waits for ever
TIMEOUT_S = 60


class Timed(ScriptedModel):
    """Each pass takes what its rows do; a token of a prompt more, the more stand before it."""

    def __init__(self) -> None:
        super().__init__(random_logits(VOCAB), VOCAB, context_length=LONG + 100)
        self.now = 0.0
        self.num_read = 0
        self.await_others: Callable[[], None] = lambda: None

    def clock(self) -> float:
        self.now += TICK_S
        return self.now

    def take(self, parts: Sequence[tuple[Session, int, bool]]) -> None:
        self.now += FIXED_S
        for session, rows, scored in parts:
            each_s = ROW_S if scored else TOKEN_S * (1 + session.length / LONG)
            self.now += rows * each_s
            self.num_read += 0 if scored else rows

    def open_session(self) -> Any:
        session = super().open_session()
        forward, prefill = session.forward, session.prefill

        def timed(tree: TokenTree) -> Forward:
            self.take([(session, len(tree), True)])
            return forward(tree)

        def timed_prefill(tokens: Sequence[int]) -> None:
            self.await_others()
            self.take([(session, len(tokens), False)])
            prefill(tokens)

        session.plain_forward = forward
        session.forward, session.prefill = timed, timed_prefill
        return session

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        self.take([(part.session, len(part.tree), part.scored) for part in parts])
        return [part.session.plain_forward(part.tree) for part in parts]  # type: ignore[attr-defined]


def test_a_long_prompt_makes_nobodys_rounds_more_than_twice_as_long() -> None:
    """The wait for a pass of others included. 10 % is for what a slice's tokens take more than the
    last one's did, and for the clock's ticks."""
    model = Timed()
    load = Concurrency()
    passes = SharedPasses(model, Losslessness(), load, model.clock)
    passes.prepare_for(2)
    passes.settle()
    load.active = 2
    writer, reader = model.open_session(), model.open_session()
    writer.committed += range(3)

    def round_s(rows: int) -> float:
        begun = model.now
        passes.forward(writer, TokenTree.chain(rows, [1] * (rows - 1)), 0)
        return model.now - begun

    for rows in (1, 2, 3) * 12:
        round_s(rows)  # which takes no slice: it is learnt what passes take
    normal_s = FIXED_S + 2 * ROW_S
    ended = Event()

    def await_writer() -> None:
        """Threads take other times than passes here: the writer comes as soon as one begins."""
        with passes._turn:
            assert passes._turn.wait_for(lambda: len(passes._queue) > 0, TIMEOUT_S)

    def read() -> None:
        model.await_others = await_writer
        passes.prefill(reader, [1] * LONG)
        ended.set()

    rounds = []
    reading = Thread(target=read)
    reading.start()
    while not ended.is_set():
        rounds.append(round_s(2))
    reading.join(TIMEOUT_S)
    assert reader.length == model.num_read == LONG
    assert len(rounds) > 50  # it was not read at once
    assert max(rounds) <= 2.2 * normal_s

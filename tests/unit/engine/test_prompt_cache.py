"""What conversations on one model read of the same beginning, on scripted sessions."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import numpy as np
import pytest

from edge_spec.core.metrics import PlainRate
from edge_spec.engine.conversation import Conversation
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import PREFILL_TOKENS, PromptCache
from edge_spec.errors import SessionError
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing.scripted import ScriptedModel, ScriptedSession

BEGINNING = list(range(600))
WHOLE = 2 * PREFILL_TOKENS  # of it, by whole passes
STATE_BYTES = 4 * WHOLE  # of a scripted session that holds these


def prompt(end: int, count: int = 50) -> list[int]:
    """Its end differs from those of others."""
    return [*BEGINNING, *(1000 * end + at for at in range(count))]


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(lambda text: np.zeros(8, np.float32), 8, context_length=4096)


@pytest.fixture
def sharing() -> PromptCache:
    """Of two conversations."""
    sharing = PromptCache()
    sharing.join()
    sharing.join()
    return sharing


def conversation(sharing: PromptCache, session: ScriptedSession) -> Conversation:
    return Conversation(Decoder(session, [], FixedPolicy()), PlainRate(), sharing)


def read(reader: Conversation, tokens: list[int], end: int | None = None) -> int:
    """Passes over its prompt, up to `end`; returns how many tokens they had."""
    session = reader.decoder.target
    start = session.length
    end = len(tokens) - 1 if end is None else end
    while session.length < end:
        reader.read(tokens, min(session.length + PREFILL_TOKENS, end))
    return session.length - start


def answer(sharing: PromptCache, session: ScriptedSession, tokens: list[int]) -> int:
    """How many tokens of the prompt were read."""
    reader = conversation(sharing, session)
    with reader.reading(tokens):
        reader.recall()
        count = read(reader, tokens)
    assert session.committed == tokens[:-1]
    return count


class Waiting:
    """A conversation that another thread begins; the block is entered once it waits."""

    def __init__(self, sharing: PromptCache, session: ScriptedSession, tokens: list[int]) -> None:
        self._waits = Event()
        self.cancelled = False
        self._threads = ThreadPoolExecutor(1)
        self.recalled = self._threads.submit(self._recall, sharing, session, tokens)

    def _recall(self, sharing: PromptCache, session: ScriptedSession, tokens: list[int]) -> int:
        asked = 0

        def cancelled() -> bool:
            nonlocal asked
            asked += 1
            if asked > 1:  # before it looks for somebody, and then while it waits
                self._waits.set()
            return self.cancelled

        reader = conversation(sharing, session)
        with reader.reading(tokens):
            reader.recall(cancelled)
            return reader.num_whole

    def __enter__(self) -> Waiting:
        assert self._waits.wait(30)
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()


@pytest.mark.parametrize("count", [50, 300, 900])
def test_the_second_reads_what_differs(
    sharing: PromptCache, model: ScriptedModel, count: int
) -> None:
    """Also where the first one went on for long after what they share."""
    assert answer(sharing, model.open_session(), prompt(1, count)) == 600 + count - 1
    assert answer(sharing, model.open_session(), prompt(2)) == 650 - 1 - WHOLE


def test_those_that_were_not_used_for_longest_go_first(model: ScriptedModel) -> None:
    sharing = PromptCache(max_bytes=2 * STATE_BYTES)
    sharing.join()
    sharing.join()
    texts = [[1000 * number + at for at in range(640)] for number in range(4)]
    for text in texts[:2]:
        assert answer(sharing, model.open_session(), text) == 639
    assert answer(sharing, model.open_session(), texts[0]) == 639 - WHOLE  # 1 is next to go
    assert answer(sharing, model.open_session(), texts[2]) == 639
    assert sharing.num_bytes == 2 * STATE_BYTES
    assert answer(sharing, model.open_session(), texts[0]) == 639 - WHOLE
    assert answer(sharing, model.open_session(), texts[1]) == 639


def test_one_that_comes_meanwhile_waits_for_what_they_share(
    sharing: PromptCache, model: ScriptedModel
) -> None:
    first, second = conversation(sharing, model.open_session()), model.open_session()
    with first.reading(prompt(1, 900)):
        first.recall()
        read(first, prompt(1, 900), PREFILL_TOKENS)
        with Waiting(sharing, second, prompt(2)) as waiting:
            assert not waiting.recalled.done()
            read(first, prompt(1, 900), WHOLE)
            assert waiting.recalled.result(30) == WHOLE  # though the first one reads on
    assert second.committed == BEGINNING[:WHOLE]


@pytest.mark.parametrize("how", ["ends", "fails", "too large"])
def test_who_waited_in_vain_reads_by_itself(model: ScriptedModel, how: str) -> None:
    sharing = PromptCache(max_bytes=STATE_BYTES - (how == "too large"))
    sharing.join()
    sharing.join()
    first, second = model.open_session(), model.open_session()
    reader = conversation(sharing, first)
    with ExitStack() as rest:
        rest.enter_context(reader.reading(prompt(1)))
        reader.recall()
        waiting = rest.enter_context(Waiting(sharing, second, prompt(2)))
        if how == "ends":
            sharing.remove(reader._reading)
        elif how == "fails":
            first.state = _failing  # type: ignore[method-assign]
            with pytest.raises(SessionError, match="disk on fire"):
                read(reader, prompt(1))
        else:
            read(reader, prompt(1))
        assert waiting.recalled.result(30) == 0
    assert second.length == 0
    assert answer(sharing, second, prompt(2)) == 649


def _failing() -> dict[str, np.ndarray]:
    raise RuntimeError("disk on fire")


def test_who_waits_can_be_cancelled(sharing: PromptCache, model: ScriptedModel) -> None:
    reader = conversation(sharing, model.open_session())
    with reader.reading(prompt(1)):
        reader.recall()
        with Waiting(sharing, model.open_session(), prompt(2)) as waiting:
            waiting.cancelled = True
            assert waiting.recalled.result(30) == 0


class Choosy(ScriptedSession):
    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        raise ValueError("no state of mine")


def test_a_state_that_is_refused_is_read_again(sharing: PromptCache, model: ScriptedModel) -> None:
    answer(sharing, model.open_session(), prompt(1))
    assert answer(sharing, Choosy(model), prompt(2)) == 649

"""Parts of the server that need no network: who gets which slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from edge_spec.apps.server.answer import Pool, Slot
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.models import Models
from edge_spec.cli.options import ServerOptions
from edge_spec.drafters.lookup.suffix import SuffixDrafter


@pytest.fixture
def slots(make_engine: Any, remembers_all: Any) -> Iterator[list[Slot]]:
    engine = make_engine(remembers_all())
    made = [Slot(engine) for _ in range(3)]
    yield made
    for slot in made:
        slot.thread.shutdown()
    engine.close()


def taken(pool: Pool, prompt: list[int], session: str | None = None) -> Slot:
    return asyncio.run(pool.take(prompt, session))


def test_a_prompt_goes_where_most_of_it_is(slots: list[Slot]) -> None:
    slots[0].tokens, slots[1].tokens, slots[2].tokens = [1, 2, 3], [1, 2, 3, 4], [9]
    assert taken(Pool(slots, 0, 1), [1, 2, 3, 4, 5]) is slots[1]


def test_a_prompt_with_little_to_share_leaves_long_conversations_alone(slots: list[Slot]) -> None:
    slots[0].tokens, slots[0].last_use = [1, 2, *range(50)], 7
    slots[1].tokens, slots[1].last_use = [3, *range(50)], 2
    slots[2].tokens, slots[2].last_use = [4, *range(50)], 5
    assert taken(Pool(slots, 0, 1), [1, 2, 70, 71]) is slots[1]  # not used for longest


def test_a_session_goes_to_its_own_slot(slots: list[Slot]) -> None:
    slots[0].tokens = [1, 2, 3]
    slots[2].session_id = "mine"
    assert taken(Pool(slots, 0, 1), [1, 2, 3], "mine") is slots[2]
    assert taken(Pool(slots, 0, 1), [1, 2, 3], "other") is slots[0]


def test_whoever_waits_gets_the_next_slot_in_turn(slots: list[Slot]) -> None:
    async def scenario() -> None:
        pool = Pool(slots[:1], queue=2, queue_timeout_s=60)
        first = await pool.take([1], None)
        waiting = [asyncio.create_task(pool.take([1], None)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (pool.num_waiting, pool.num_busy) == (2, 1)
        with pytest.raises(ApiError, match="Too many"):
            await pool.take([1], None)
        waiting[0].cancel()
        pool.release(first)
        assert await waiting[1] is first
        pool.release(first)
        assert (pool.num_waiting, pool.num_busy) == (0, 0)

    asyncio.run(scenario())


def test_of_those_that_wait_the_first_is_served_first(slots: list[Slot]) -> None:
    async def scenario() -> None:
        pool = Pool(slots[:1], queue=3, queue_timeout_s=60)
        slot = await pool.take([1], None)
        served: list[int] = []

        async def ask(number: int) -> None:
            taken = await pool.take([1], None)
            served.append(number)
            pool.release(taken)

        waiting = [asyncio.create_task(ask(number)) for number in range(3)]
        await asyncio.sleep(0)
        pool.release(slot)
        await asyncio.gather(*waiting)
        assert served == [0, 1, 2]

    asyncio.run(scenario())


def test_a_slot_that_comes_as_the_wait_ends_is_not_lost(slots: list[Slot]) -> None:
    async def scenario() -> None:
        pool = Pool(slots[:1], queue=1, queue_timeout_s=60)
        slot = await pool.take([1], None)
        waiting = asyncio.create_task(pool.take([1], None))
        await asyncio.sleep(0)
        pool.release(slot)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.num_busy == 0

    asyncio.run(scenario())


def test_a_pool_that_is_closed_sends_everybody_away(slots: list[Slot]) -> None:
    async def scenario() -> None:
        pool = Pool(slots[:1], queue=1, queue_timeout_s=60)
        await pool.take([1], None)
        waiting = asyncio.create_task(pool.take([1], None))
        await asyncio.sleep(0)
        pool.close()
        for late in (waiting, pool.take([1], None)):
            with pytest.raises(ApiError, match="shutting down"):
                await late

    asyncio.run(scenario())


def test_an_engine_that_was_lent_stays_open_with_its_drafter(
    make_engine: Any, remembers_all: Any
) -> None:
    with make_engine(remembers_all(), [SuffixDrafter()]) as engine:
        models, drafter = Models.of(engine, ServerOptions(parallel=2)), engine.drafter
        engine.set_drafter("none")  # as a request may
        models.close()
        assert engine.drafter == drafter != "none"
        assert engine.generate([1, 2], max_tokens=1).tokens

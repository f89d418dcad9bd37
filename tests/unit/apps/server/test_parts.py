"""Parts of the server that need no network: who gets which slot, and calls of tools in a text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.slots import Pool, Slot
from edge_spec.apps.server.tool_calls import ToolCallReader, joined_calls
from edge_spec.text.template_traits import ToolForm

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n</tool_call>'


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


def read(
    text: str, cuts: list[int], form: ToolForm | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """What is read of a text that comes in pieces."""
    reader, shown, calls = ToolCallReader(form or ToolForm()), "", []
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        piece, made = reader.push(text[start:end])
        assert len({each["index"] for each in made}) == len(made)  # clients join no two of one
        shown, calls = shown + piece, calls + made
    piece, made = reader.finish()
    return shown + piece, [call["function"] for call in joined_calls(calls + made)]


F = {"name": "f", "arguments": '{"a": [1, "ü"]}'}
G = {"name": "g", "arguments": r'{"}\"": {"b": "\\"}}'}
CALL_G = f'<tool_call>\n{{"name": "g", "arguments": {G["arguments"]}}}\n</tool_call>'
BARE = ToolForm("", "", "parameters")


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (CALL, "", [F]),
        (f"{CALL}\n{CALL}\n", "", [F, F]),
        (f"I ask.\n{CALL}", "I ask.\n", [F]),
        (f"{CALL}\nSo.", "\nSo.", [F]),
        (f"I ask.\n{CALL}\n{CALL}\nSo. \n", "I ask.\n\nSo. \n", [F, F]),
        (CALL.removesuffix("\n</tool_call>"), "", [F]),
        (f"{CALL_G}\n{CALL}", "", [G, F]),
        (f'{CALL}\n<tool_call>\n{{"na', "", [F]),
        (CALL[:-20], "", [{"name": "f", "arguments": '{"a": [1,'}]),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>{"name":"f","arguments":{}}', "", [{"name": "f", "arguments": "{}"}]),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>.', '<tool_call>{"name": 1}</tool_call>.', []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("", "", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_read_however_the_text_comes(
    text: str, shown: str, calls: list[Any], cuts: list[int]
) -> None:
    assert read(text, cuts) == (shown, calls)


@given(text=st.text("<tool_cal>/x \n{", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=9))
def test_what_is_no_call_stays_text(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == (text, [])


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "f", "parameters": {"a": [1, "ü"]}}', "", [F]),
        ('{"name": "f", "parameters": {"a": [1, "ü"]}', "", [F]),
        ('{"name": "f", "parameters": {"a"', "", [{"name": "f", "arguments": '{"a"'}]),
        ('{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
        ('{"na', '{"na', []),
        ('{"a": 1}', '{"a": 1}', []),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_without_tags_is_a_call_or_none(
    text: str, shown: str, calls: list[Any], cuts: list[int]
) -> None:
    assert read(text, cuts, BARE) == (shown, calls)


def test_calls_are_counted_and_told_apart() -> None:
    reader = ToolCallReader()
    _, calls = reader.push(CALL + CALL)
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2


def test_a_call_is_told_as_it_comes_its_name_first() -> None:
    reader = ToolCallReader()
    begin, piece, _ = CALL.partition('"a"')
    assert reader.push(begin[:-3]) == ("", [])
    _, (first,) = reader.push(begin[-3:])
    assert first["function"] == {"name": "f", "arguments": "{"} and first["id"]
    assert reader.push(piece) == ("", [{"index": 0, "function": {"arguments": piece}}])
    assert not reader.is_cut
    reader.finish()
    assert reader.is_cut

"""The turns of an agent read little more than what is new in them, whatever the model can take
back of its text, and write what they would have written after reading all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.engine.prompt_cache import CONVERSATION_SUFFIX, PREFILL_TOKENS
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.agent_turns import (
    FILES,
    KINDS,
    MODULES,
    Asked,
    Turn,
    agent_run,
    ask_turns,
    open_tiny,
    write_thinking,
)
from fixtures.server_requests import CHAT, answered

TURNS = agent_run(FILES)
FEW = [TURNS[index] for index in (0, 1, 7, 8)]  # the last one drops thoughts
QUICK = ("plain-ort", "hybrid-llamacpp")
MORE = [TURNS[index] for index in (11, 12, 13, 14, 21, 22, 23)]
# Where a text goes on from a place, that is short of what asks for the answer, at first by a guess.
MOST_MORE = {"hybrid-llamacpp": 24, "lfm2-llamacpp": 24}
_FAR = 1000  # tokens to read: such a prompt parts from the text before further back


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield {
            kind: write_thinking(kind, tmp_path_factory.mktemp(kind), patch)
            for kind, (runtime, _) in KINDS.items()
            if not _is_missing(runtime)
        }


def _is_missing(runtime: str) -> bool:
    try:
        __import__(MODULES[runtime])
    except ImportError:
        return True
    return False


def _marked(kind: str) -> Any:
    return kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)


@pytest.fixture(params=map(_marked, KINDS))
def kind(request: pytest.FixtureRequest, models: dict[str, Path]) -> str:
    if request.param not in models:
        pytest.skip("its runtime is not installed")
    return str(request.param)


def test_a_turn_reads_little_more_than_what_is_new_and_changes_no_text(
    kind: str, models: dict[str, Path]
) -> None:
    _require_reading_little(kind, models[kind], FEW)


@pytest.mark.slow
def test_so_does_one_of_a_long_run(models: dict[str, Path]) -> None:
    _require_reading_little("hybrid-llamacpp", models["hybrid-llamacpp"], MORE)


def _require_reading_little(kind: str, model: Path, turns: Sequence[Turn]) -> None:
    with open_tiny(kind, model) as engine:
        expected = [turn.text for turn in ask_turns(engine, turns, forgets=True)]
    for drafter in ("none", "suffix"):
        with open_tiny(kind, model, drafter=drafter) as engine:
            asked = ask_turns(engine, turns)
        assert [turn.text for turn in asked] == expected
        _require_little_more(kind, asked)


def _require_little_more(kind: str, asked: Sequence[Asked]) -> None:
    for number, turn in enumerate(asked):
        more = turn.read - turn.needed
        if number > 1 and turn.needed < _FAR:
            most = MOST_MORE.get(kind, 0)
        else:
            most = 2 * PREFILL_TOKENS if kind in MOST_MORE else 0
        assert 0 <= more <= most, (number, turn)


def test_agents_that_share_a_cache_in_turns_go_on_where_they_were(
    kind: str, models: dict[str, Path]
) -> None:
    """Each with a system prompt of its own, of which the others have the beginning."""
    agents = [_with_system(f" You are agent {name}.") for name in "ABC"]
    with open_tiny(kind, models[kind]) as engine:
        alone = [ask_turns(engine, turns) for turns in agents]
    with open_tiny(kind, models[kind]) as engine:
        taken = [ask_turns(engine, [turns[at]])[0] for at in range(3) for turns in agents]
    for agent, asked in enumerate(alone):
        found = taken[agent :: len(agents)]
        assert [turn.text for turn in found] == [turn.text for turn in asked]
        for before, turn in zip(asked[1:], found[1:], strict=True):
            assert turn.read <= before.needed + MOST_MORE.get(kind, 0)


def _with_system(text: str) -> list[Turn]:
    found = []
    for turn in TURNS[1:4]:
        first, *others = turn.messages
        system = {**first, "content": first["content"] + text}
        found.append(replace(turn, messages=[system, *others]))
    return found


@pytest.mark.parametrize("named", [True, False])
def test_a_server_tells_what_the_turns_of_more_agents_than_slots_did_not_read(
    models: dict[str, Path], named: bool
) -> None:
    kind = "hybrid-llamacpp"
    if kind not in models:
        pytest.skip("its runtime is not installed")
    agents = {name: _with_system(f" You are agent {name}.") for name in "ABC"}
    read = dict.fromkeys(agents, 0)
    with (
        open_tiny(kind, models[kind]) as engine,
        RunningServer(engine, ServerOptions(port=0, parallel=2)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for at in range(3):
            for name, turns in agents.items():
                body = {
                    "messages": turns[at].messages,
                    "tools": turns[at].tools[:1],
                    "max_tokens": 4,
                    **({"session_id": name} if named else {}),
                }
                found = answered(client.post(CHAT, json=body))
                usage, timings = found["usage"], found["timings"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached == timings["cache_n"]
                assert usage["prompt_tokens"] - cached == timings["prompt_n"]
                if at:
                    assert cached >= read[name] - 64, (at, name)
                read[name] = usage["prompt_tokens"]


def test_a_run_goes_on_after_a_restart(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Also in a process beside it, and where a file is damaged, only more is read."""
    turns = TURNS[1:5]
    with open_tiny(kind, models[kind]) as engine:
        expected = ask_turns(engine, turns)
    found, kept = [], tmp_path / "kept"
    for some in (turns[:2], turns[2:3]):
        with open_tiny(kind, models[kind], prompt_cache=str(kept)) as engine:
            found += ask_turns(engine, some)
        assert (
            len(list(kept.glob(f"*{CONVERSATION_SUFFIX}"))) == 1
        )  # what it has gone on from is gone
    assert found[2].read <= expected[2].needed + MOST_MORE.get(kind, 0)
    one, other = (open_tiny(kind, models[kind], prompt_cache=str(kept)) for _ in range(2))
    with one, other:
        beside = [ask_turns(engine, turns[3:])[0] for engine in (one, other)]
    assert [turn.text for turn in (*found, beside[0])] == [turn.text for turn in expected]
    assert beside[0] == beside[1]
    [path] = kept.glob(f"*{CONVERSATION_SUFFIX}")
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    with open_tiny(kind, models[kind], prompt_cache=str(kept)) as engine:
        [damaged] = ask_turns(engine, turns[3:])
        assert not path.exists()
    assert damaged.text == beside[0].text and damaged.read > beside[0].read

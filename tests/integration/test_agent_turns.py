"""The turns of an agent read little more than what is new in them, whatever the model can take
back of its text, and write what they would have written after reading all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from edge_spec.engine.prompt_files import PREFILL_TOKENS
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

TURNS = agent_run(FILES)
FEW = [TURNS[index] for index in (0, 1, 7, 8)]  # the last one drops thoughts
MORE = [TURNS[index] for index in (11, 12, 13, 14, 21, 22, 23)]
# Where a text goes on from a place, that is short of what asks for the answer, at first by a guess.
MOST_MORE = {"hybrid-llamacpp": 24, "lfm2-llamacpp": 24}
FAR = ("is asked", "is cleared", "is dated")  # part from the text before further back


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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, models: dict[str, Path]) -> str:
    if request.param not in models:
        pytest.skip("its runtime is not installed")
    return str(request.param)


def test_a_turn_reads_little_more_than_what_is_new_and_changes_no_text(
    kind: str, models: dict[str, Path]
) -> None:
    _require_reading_little(kind, models[kind], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOST_MORE)
def test_so_does_one_of_a_long_run(kind: str, models: dict[str, Path]) -> None:
    _require_reading_little(kind, models[kind], MORE)


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
        if number > 1 and turn.what not in FAR:
            most = MOST_MORE.get(kind, 0)
        else:
            most = 2 * PREFILL_TOKENS if kind in MOST_MORE else 0
        assert 0 <= more <= most, (number, turn)

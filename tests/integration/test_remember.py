"""What earlier requests wrote drafts later ones, where that is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec import Engine
from edge_spec.cli.main import run
from edge_spec.core.model import Forward
from edge_spec.core.tree import Verdict
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import UsageError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions

VOCAB = 256
PROMPT = "a prompt that is asked again "
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def load(hf: Any) -> Any:
    def load(**options: Any) -> Engine:
        asked = LoadOptions(**{"runtime": "reference", "remember": True} | options)
        return load_engine(str(hf()), asked, lambda what, fraction: None)

    return load


def answer(engine: Engine, prompt: str = PROMPT) -> tuple[str, int]:
    """Returns a text, and how many of its tokens earlier answers drafted."""
    with engine.verifying_all_draft_tokens():
        result = engine.generate(prompt, max_tokens=48)
    drafters = result.stats.drafters
    return result.text, drafters["answers"].draft_n_accepted if "answers" in drafters else 0


def test_an_answer_drafts_the_same_one_of_any_conversation(load: Any) -> None:
    with load(drafter="none", remember=False) as plain:
        expected = plain.generate(PROMPT, max_tokens=48).text
    with load() as engine, engine.fork() as other:
        first, before = answer(engine)
        answer(engine, "another prompt ")  # ends the answer before it
        second, drafted = answer(other)
        assert (before, first, second) == (0, expected, expected)
        assert drafted > 20
    with load() as later:  # from the file
        text, drafted = answer(later)
        assert text == expected and drafted > 20


def test_conversations_draft_from_each_other(cache: Path) -> None:
    context = DrafterContext(
        VOCAB, lambda: {chr(token): token for token in range(VOCAB)}, cache / "answers" / "a.json"
    )
    one, other = factory.answers(context), factory.answers(replace(context, drafts=()))
    text = list(b"a text that one of them writes")
    one.begin(text[:2])
    out = Forward(np.zeros((1, VOCAB), np.float32))
    for token in text[2:]:
        tree = one.propose(0, Budget(0, 1))
        one.observe(tree, out, Verdict((token,), (), exhausted=False))
    one.begin(text[:2])
    other.begin(text[:8])
    tree = other.propose(text[7], Budget(8, 9))
    assert tree.tokens.tolist() == text[7 : 7 + len(tree)] and len(tree) > 4


def test_nothing_is_kept_unless_it_is_asked_for(load: Any, cache: Path) -> None:
    with load(remember=False) as engine:
        answer(engine)
        assert answer(engine)[1] == 0
    assert not (cache / "answers").exists()


def test_one_command_forgets_it_also_while_a_model_is_open(
    load: Any, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with load() as engine:
        answer(engine)
    with load() as engine:
        assert answer(engine)[1] > 20
        answer(engine, "another prompt ")
        capsys.readouterr()
        assert run(["learn", "status", "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)["remembered"]
        assert told["bytes"] == Path(told["path"]).stat().st_size
        assert run(["learn", "status"]) == 0
        assert told["path"] in capsys.readouterr().out
        assert run(["learn", "forget", told["model"], "--json"]) == 0
        assert list(json.loads(capsys.readouterr().out)["freed_bytes"].values()) == [told["bytes"]]
        assert not list((cache / "answers").glob("*.json"))
        answer(engine, "a third one ")
        assert answer(engine)[1] < 20  # the third answer may share a few tokens with it
    assert run(["learn", "forget", "nobody"]) == 2
    assert "nothing was learnt" in capsys.readouterr().err


def test_drafters_that_do_not_use_it_refuse_it() -> None:
    with pytest.raises(UsageError, match="--remember would not be used by"):
        LoadOptions(drafter="suffix", remember=True)
    assert LoadOptions(drafter="suffix,answers", remember=True).remember

"""The first promise, for every drafter on every runtime: greedy text is the plain text.

On a tiny model of random weights, whose text no drafter knows much about: draft tokens are mostly
wrong, which is when a cache goes wrong unnoticed. In float32 rows differ by the order of sums
alone, far less than the margins between tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.drafters import factory
from edge_spec.drafters.protocol import Cost
from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.placement.layer_selection import ChosenPart
from edge_spec.storage.atomic import CACHE_VARIABLE
from edge_spec.text.grammar import Grammar

RUNTIMES = {
    "reference": {},
    "ort": {"quantization": "fp32"},
    "llamacpp": {"quantization": "F32", "kv_type": "f32", "flash_attention": False},
}
NUM_PROMPTS, NUM_TOKENS = 6, 40
TRAITS = factory.installed_traits()
FREE = [name for name, traits in TRAITS.items() if traits.cost is Cost.LOOKUP]
OF_TARGET = [name for name, traits in TRAITS.items() if traits.target_layers]


@pytest.fixture(scope="module", params=RUNTIMES)
def engine(
    request: pytest.FixtureRequest,
    hf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """With a corpus, and a cache directory of its own for what drafters keep."""
    folder = tmp_path_factory.mktemp("drafters")
    (folder / "corpus.txt").write_text("the cat sat on the mat " * 20, encoding="utf-8")
    options = LoadOptions(
        runtime=request.param,
        corpora=(folder / "corpus.txt",),
        threads=1,
        **RUNTIMES[request.param],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        with load_engine(str(hf()), options, lambda what, fraction: None) as engine:
            parts: Any = engine.parts.speculation_factory.setting.parts
            parts |= {"early-exit": ChosenPart(1), "layer-skip": ChosenPart(None, (0,))}
            yield engine


def prompts(engine: Engine) -> list[list[int]]:
    """Random tokens, some of them repeated so that there is something to copy."""
    rng = np.random.default_rng(7)
    vocab_size = engine.parts.model.config.vocab_size
    parts = [rng.integers(3, vocab_size, rng.integers(2, 12)).tolist() for _ in range(NUM_PROMPTS)]
    return [part * (1 + index % 3) for index, part in enumerate(parts)]


def answers(engine: Engine, drafters: str) -> list[list[int]]:
    engine.set_drafter(drafters)
    return [
        [token.id for token in engine.generate(prompt, max_tokens=NUM_TOKENS).tokens]
        for prompt in prompts(engine)
    ]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    return answers(engine, "none")


@pytest.mark.parametrize(
    "drafters",
    ["auto", *FREE, ",".join(FREE), *OF_TARGET],
)
def test_greedy_text_is_the_plain_text(
    engine: Engine, plain: list[list[int]], drafters: str
) -> None:
    if drafters in OF_TARGET and engine.parts.runtime != "ort":
        pytest.skip("only onnxruntime can run a model in part")
    assert sum(map(len, plain)) > NUM_PROMPTS * NUM_TOKENS // 2
    assert answers(engine, drafters) == plain
    assert all(
        getattr(drafter, "fault", None) is None for drafter in engine._drafting.speculation.drafters
    )


def test_answers_of_a_given_form_are_the_plain_ones(engine: Engine) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    grammar = Grammar.json_schema({"type": "object", "required": ["a", "b"], **schema})

    def texts(drafters: str) -> list[str]:
        engine.set_drafter(drafters)
        return [
            engine.generate(prompt, max_tokens=NUM_TOKENS, grammar=grammar).text
            for prompt in prompts(engine)[:4]
        ]

    plain = texts("none")
    assert all(text.startswith('{"a": ') for text in plain)
    for drafters in ("auto", ",".join(FREE)):
        assert texts(drafters) == plain
        with (
            engine.verifying_all_draft_tokens()
        ):  # what pays on a model this small is up to the machine
            assert texts(drafters) == plain
            assert engine.last is not None
            assert engine.last.stats.drafters["grammar"].draft_n_accepted > 0


def test_accounts_of_cut_answers_are_the_plain_ones(engine: Engine, plain: list[list[int]]) -> None:
    """Each answer is cut by characters that it has, most of them within a round."""
    asked = list(zip(prompts(engine), plain, strict=True))[:6]
    texts = [engine.parts.text.tokenizer.decode(tokens) for _, tokens in asked]

    def accounts(drafters: str) -> list[Any]:
        engine.set_drafter(drafters)
        found: list[Any] = []
        with engine.verifying_all_draft_tokens():
            for (prompt, _), text in zip(asked, texts, strict=True):
                result = engine.generate(prompt, max_tokens=NUM_TOKENS, stop=text[9:11], logprobs=0)
                tokens = [(token.id, token.text, token.raw) for token in result.tokens]
                assert result.stats.predicted_n == len(tokens)
                found.append((result.text, tokens, result.finish_reason))
        return found

    expected = accounts("none")
    for drafters in (*FREE, ",".join(FREE)):
        assert accounts(drafters) == expected


@pytest.mark.parametrize(
    "drafters",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("recycling", "lookahead")),
        ",".join(FREE),
    ],
)
def test_a_conversation_goes_on_after_cut_and_cancelled_answers(
    engine: Engine, drafters: str
) -> None:
    """The cache of branches, cut runs and cancelled rounds serves the next turn as a fresh one."""

    def turns(names: str) -> list[list[int]]:
        engine.set_drafter(names)
        text, answered = prompts(engine)[2], []
        for max_tokens in (1, 2, 7, 30, 3, 20):
            result = engine.generate(text, max_tokens=max_tokens)
            answered.append([token.id for token in result.tokens])
            running = engine.generate([*text, *answered[-1]], max_tokens=20, stream=True)
            next(running, None)
            running.cancel()
            running.close()
            text = [*text, *answered[-1], 5]
        return answered

    assert turns(drafters) == turns("none")

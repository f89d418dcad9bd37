"""Conversations that begin alike read that beginning once, and no bit of their answers changes, on
the real runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.engine import Engine
from edge_spec.engine.prompt_cache import PREFILL_TOKENS
from edge_spec.engine.results import GenerationResult
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.reference.model import ReferenceSession
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.axes import each
from fixtures.long_prompts import DOCUMENT, MODULES, RUNTIMES, answer, bits, tokens

Open = Callable[..., Engine]
SYSTEM = DOCUMENT[:600]
WHOLE = 2 * PREFILL_TOKENS  # of it, by whole passes
COUNT = 3  # conversations


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("long") / "model"
    tiny.write_hf(tiny.build("llama", max_position_embeddings=2048), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield path


@pytest.fixture(params=RUNTIMES)
def opened(request: pytest.FixtureRequest, model: Path) -> Callable[..., Engine]:
    runtime = request.param
    if runtime in MODULES:
        pytest.importorskip(MODULES[runtime])

    def load(**options: Any) -> Engine:
        asked: dict[str, Any] = {"drafter": "none", "threads": 1} | RUNTIMES[runtime] | options
        options_read = LoadOptions(runtime=runtime, **asked)
        return load_engine(str(model), options_read, lambda what, fraction: None)

    return load


def alone(opened: Open, prompts: Sequence[list[int]], **options: Any) -> list[GenerationResult]:
    """Answers of engines of their own."""
    found = []
    for prompt in prompts:
        with opened() as engine:
            found.append(answer(engine, prompt, **options))
    return found


def together(
    engines: Sequence[Engine], prompts: Sequence[list[int]], **options: Any
) -> list[GenerationResult]:
    """Each asked by a thread of its own, at the same moment."""
    begins = Barrier(len(engines))

    def ask(engine: Engine, prompt: list[int]) -> GenerationResult:
        begins.wait(60)
        return answer(engine, prompt, **options)

    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(ask, engines, prompts))


@pytest.mark.parametrize(  # tokens after what they share
    ("num_own", "sampled"), each([40, 300], [False, True])
)
def test_answers_are_those_of_conversations_alone(
    opened: Open, num_own: int, sampled: bool
) -> None:
    options = {"sampling": SamplingParams(temperature=1.0, seed=5)} if sampled else {}
    prompts = [SYSTEM + tokens(seed, num_own) for seed in range(COUNT)]
    expected = alone(opened, prompts, **options)
    with opened() as engine, ExitStack() as rest:
        engines = [engine, *(rest.enter_context(engine.fork()) for _ in range(COUNT - 1))]
        found = together(engines, prompts, **options)
        # Likewise where the others have long ended.
        last = answer(rest.enter_context(engine.fork()), prompts[0], **options)
    assert sorted(each.stats.cached_n for each in found) == [0] + [WHOLE] * (COUNT - 1)
    assert last.stats.cached_n >= WHOLE
    for one, other in zip([*found, last], [*expected, expected[0]], strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        # numpy adds up a slice of a prompt in another order than all of it.
        assert engine.runtime == "reference" or bits(one) == bits(other)


@pytest.mark.parametrize("num_own", [40, 300])
def test_a_common_beginning_is_read_once(
    model: Path, monkeypatch: pytest.MonkeyPatch, num_own: int
) -> None:
    """Counted where the model reads: one beginning, as far as whole passes go, and all ends."""
    read: list[int] = []
    prefill = ReferenceSession.prefill

    def counting(session: ReferenceSession, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        prefill(session, tokens)

    options = LoadOptions(runtime="reference", drafter="none")
    with ExitStack() as opened:
        engine = opened.enter_context(load_engine(str(model), options, lambda what, part: None))
        engines = [engine, *(opened.enter_context(engine.fork()) for _ in range(3))]
        monkeypatch.setattr(ReferenceSession, "prefill", counting)
        together(engines, [SYSTEM + tokens(seed, num_own) for seed in range(4)])
    prompt = len(SYSTEM) + num_own - 1  # the last token is scored
    assert sum(read) == WHOLE + 4 * (prompt - WHOLE)

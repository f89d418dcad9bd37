"""Features in passes that conversations share on llama.cpp: each has those of its own passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.features import collects
from edge_spec.core.model import Forward
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.runtimes.llamacpp import LlamaCppModel, cache
from fixtures import heads
from fixtures.head_drafting import oblige_each
from fixtures.random_trees import random_path, random_tree

pytest.importorskip("llama_cpp")

FINAL, VOCAB = 2, 265
WANTED: Sequence[tuple[int, ...]] = ((1,), (0, FINAL), (), (0, 1))  # of each session, at first
LAYERS = 7  # of the target of heads
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], list(range(20, 90)), [3, 4, 3, 4, 3, 4]]
LENGTH = 40


class Told:
    """One session and the features of its text, as a drafter keeps them."""

    def __init__(self, model: LlamaCppModel, layers: Sequence[int]) -> None:
        self.session: Any = model.open_session()
        self.kept: dict[int, np.ndarray] = {}
        self.collect(layers)

    def collect(self, layers: Sequence[int]) -> None:
        self.kept.clear()
        self.layers = layers
        if layers or collects(self.session):
            self.session.collect_features(layers, self.put)

    def put(self, position: int, rows: np.ndarray) -> None:
        self.kept |= {position + at: row.copy() for at, row in enumerate(rows)}

    def commit(self, out: Forward | None, path: Sequence[int]) -> None:
        """out: None for what nobody has scored, of which it is told."""
        before = self.session.length
        self.session.commit(path)
        assert out is None or (out.features is None) == (not self.layers)
        if out is not None and out.features is not None:
            self.put(before, out.features[path])

    def known(self) -> dict[int, np.ndarray]:
        return {at: row for at, row in self.kept.items() if at < self.session.length}


@pytest.mark.parametrize("first_cells", [32, 1024])
def test_each_has_the_features_of_its_own_passes(
    first_cells: int,
    gguf: Callable[..., Path],
    open_llama: Callable[..., LlamaCppModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the others want, who comes and goes, of trees, slices of prompts, prompts, lone
    passes, and after rollbacks and snapshots. Of a fresh reader nothing is known before it. All is
    bit-identical. A small cache moves all the time."""
    monkeypatch.setattr(cache, "FIRST_TOKENS", first_cells)
    model = open_llama("llamacpp", gguf("qwen2", "Q4_0"), context_length=128)
    if not model.capabilities.invariant_rows:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")
    pairs = [(Told(model, layers), Told(model, layers)) for layers in WANTED]
    drawn: Any = np.random.RandomState(first_cells)
    for round in range(40):
        taking = drawn.permutation(4)[: drawn.randint(1, 5)].tolist()
        unread = taking[-1] if len(taking) > 1 and drawn.randint(2) else None
        drafts = [drawn.randint(3, VOCAB, 5).tolist() for _ in taking]
        trees = [random_tree(drawn, tokens) for tokens in drafts]
        if unread is not None:
            trees[-1] = TokenTree.chain(drafts[-1][0], drafts[-1][1:])
        shared = [pairs[each][0].session for each in taking]
        if len(taking) == 1:
            outs = [shared[0].forward(trees[0])]
        else:
            parts = zip(shared, trees, [each != unread for each in taking], strict=True)
            rows = 5 * len(taking) + drawn.randint(2)
            outs = model.forward_together([PassPart(*part) for part in parts], rows)
        for each, tree, out in zip(taking, trees, outs, strict=True):
            told, own = pairs[each]
            if each == unread:
                told.commit(None, range(5))
                own.session.prefill(tree.tokens.tolist())
            else:
                expected = own.session.forward(tree)
                np.testing.assert_array_equal(out.logits, expected.logits)
                path = random_path(drawn, tree)
                told.commit(out, path)
                own.commit(expected, path)
        one = pairs[drawn.randint(4)]
        back, more = drawn.randint(0, 4), drawn.randint(3, VOCAB, drawn.randint(1, 12)).tolist()
        layers = WANTED[drawn.randint(4)]
        for each in one:
            each.session.rollback(max(0, min(each.session.length, 90) - back))
            if round % 3 == 0:
                each.session.prefill(more)
            if round % 7 == 6:
                each.collect(layers)
            if round % 5 == 4 and (state := each.session.state()):
                each.session.restore(state, each.session.length)
        for told, own in pairs:
            assert told.known().keys() == own.known().keys()
            for at, row in told.known().items():
                np.testing.assert_array_equal(row, own.kept[at])
        if round % 15 == 14:
            for each in pairs[round % 4]:
                each.session.close()
            pairs[round % 4] = (Told(model, layers), Told(model, layers))
    model.close()


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", 2, num_hidden_layers=LAYERS)
    return Path(tiny.write_gguf(model, tmp_path_factory.mktemp("target") / "t.gguf", "Q4_0"))


@pytest.fixture(scope="module")
def opened(target: Path) -> Callable[..., Engine]:
    return partial(edge_spec.load, str(target), runtime="llamacpp", threads=1)


@pytest.fixture(scope="module")
def plain(opened: Callable[..., Engine]) -> list[list[int]]:
    with opened(drafter="none") as engine:
        return [text_of(engine, prompt) for prompt in PROMPTS]


@pytest.fixture(params=["eagle", "medusa"])
def drafting(
    request: pytest.FixtureRequest,
    plain: list[list[int]],
    opened: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Engine]:
    """drafting(): the target with a head that is often right."""
    if request.param == "eagle":
        path = heads.draw(LAYERS, VOCAB, "safeailab").write(tmp_path / "head")
        oblige_each(monkeypatch, list(zip(PROMPTS, plain, strict=True)))
    else:
        with opened(drafter="none") as engine:
            session = engine.parts.model.open_session()
            session.prefill(PROMPTS[0][:-1])
            out = session.forward(TokenTree.chain(PROMPTS[0][-1], plain[0][: LENGTH - 1]))
            assert out.hidden is not None
            states = out.hidden.copy()
            session.close()
        path = heads.write_medusa(tmp_path / "head", states, np.array(plain[0]), VOCAB)
    return partial(opened, drafter=request.param, draft=str(path))


def text_of(engine: Engine, prompt: list[int]) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=LENGTH).tokens]


@contextmanager
def forks(engine: Engine, count: int) -> Iterator[list[Engine]]:
    engines = [engine, *(engine.fork() for _ in range(count - 1))]
    yield engines
    for each in engines[1:]:
        each.close()


@pytest.mark.usefixtures("fixed_policy")
@pytest.mark.parametrize("num_clients", [2, 4])
def test_texts_of_heads_are_plain_whoever_is_beside(
    num_clients: int,
    drafting: Callable[..., Engine],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one drafts without the head, and takes it up for its second answer. Each part of a
    shared pass has what its drafter reads."""
    together = LlamaCppModel.forward_together

    def noted(model: LlamaCppModel, parts: Sequence[PassPart], rows: int) -> list[Forward]:
        outs = together(model, parts, rows)
        for part, out in zip(parts, outs, strict=True):
            assert (out.features is not None) == collects(part.session)
        return outs

    monkeypatch.setattr(LlamaCppModel, "forward_together", noted)
    with drafting() as engine, forks(engine, num_clients) as engines:
        batch = engine.parts.batch
        batch.prepare_for(num_clients)
        batch.settle()
        [head] = engine.generate(PROMPTS[0], max_tokens=8).stats.drafters
        asked, expected = PROMPTS[:num_clients], plain[:num_clients]
        for drafter in ("suffix", head):
            engines[-1].set_drafter(drafter)
            with ThreadPoolExecutor(num_clients) as threads:
                assert list(threads.map(text_of, engines, asked)) == expected
        assert engine.generate(PROMPTS[0], max_tokens=LENGTH).stats.drafters[head].draft_n > 0

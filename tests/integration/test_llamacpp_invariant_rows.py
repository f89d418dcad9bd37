"""Bits of a row follow from its text alone where edge-spec's own kernels compute all of a model on
llama.cpp: whatever is drafted, rejected, forgotten and shared, and however prompts are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType, LlamaFileType

from edge_spec.core.model import Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.gguf.export import quantize
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS, measure_batch_invariance
from edge_spec.scheduler.lossless import slices_alike
from fixtures import family_gguf
from fixtures.random_trees import random_path, random_tree
from fixtures.silence import quiet

CONTEXT = 512
KINDS = ("Q4_1", "Q8_0", "experts")
OpenLlama = Callable[..., LlamaCppModel]
Tokens = Callable[..., list[int]]


@pytest.fixture(params=KINDS)
def model(
    request: pytest.FixtureRequest, tiny: Any, tmp_path: Path, open_llama: OpenLlama
) -> Iterator[LlamaCppModel]:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "model.gguf"
    if request.param == "experts":
        write_experts(path)
    else:
        tiny.write_gguf(tiny.build("llama", max_position_embeddings=CONTEXT), path, request.param)
    model = open_llama("llamacpp", path, threads=2)
    if not model.capabilities.invariant_rows:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")
    yield model
    model.close()


def write_experts(path: Path) -> None:
    """A mixture of experts as files have them: all is Q8_0 but the routers, which stay float32."""
    whole = family_gguf.write_gguf(
        "qwen3moe", path.with_name("float32.gguf"), max_position_embeddings=CONTEXT
    )
    quantize(whole, path, LlamaFileType.MOSTLY_Q8_0, quiet)
    routers = {each.tensor_type for each in GGUFReader(path).tensors if "_inp" in each.name}
    assert routers == {GGMLQuantizationType.F32}


def scored_at_once(model: LlamaCppModel, text: Sequence[int], tree: TokenTree) -> np.ndarray:
    """Returns the logits of a tree's rows, each as the end of a chain after a text that a new
    session reads at once."""
    session = model.open_session()
    session.prefill(text)
    found = []
    for row in range(len(tree)):
        path = tree.tokens[tree.path(row)].tolist()
        found.append(session.forward(TokenTree.chain(path[0], path[1:])).logits[-1].copy())
    session.close()
    return np.array(found)


class Told:
    """Does the same on a session as on the text that it then has to hold."""

    def __init__(self, model: LlamaCppModel, drawn: Any, tokens: Tokens) -> None:
        self.session: Session = model.open_session()
        self.text: list[int] = []
        self._drawn, self._tokens, self._seed = drawn, tokens, 0

    def draw(self, most: int) -> list[int]:
        self._seed += 1
        return self._tokens(int(self._drawn.randint(1, most + 1)), self._seed)

    def read(self, most: int) -> None:
        tokens = self.draw(most)
        self.session.prefill(tokens)
        self.text += tokens

    def commit(self, tree: TokenTree) -> None:
        """Keeps a path or nothing; forgets some of the text, or reads more, now and then."""
        if self._drawn.randint(6):
            kept = random_path(self._drawn, tree)
            self.session.commit(kept)
            self.text += tree.tokens[kept].tolist()
        else:
            self.session.rollback(len(self.text))  # as the decoder does
        if self._drawn.randint(5) == 0 or len(self.text) > CONTEXT - 150:
            self.text = self.text[: max(1, len(self.text) - int(self._drawn.randint(1, 90)))]
            self.session.rollback(len(self.text))
        if self._drawn.randint(4) == 0:
            self.read(70)


def test_nothing_that_is_measured_of_the_rows_says_otherwise(model: LlamaCppModel) -> None:
    """It holds also where the library says that it cannot be measured: one way, all widths."""
    found = measure_batch_invariance(model, USUAL_WIDTHS)
    assert found.invariant_widths == USUAL_WIDTHS
    assert found.branch_invariant and found.probe_invariant and found.tie_margin == 0
    assert slices_alike(model)
    assert len(model.ways) == 1


def test_rows_of_trees_score_as_chains_after_any_past(model: LlamaCppModel, tokens: Tokens) -> None:
    drawn: Any = np.random.RandomState(5)
    told = Told(model, drawn, tokens)
    told.read(300)
    for round in range(60):
        tree = random_tree(drawn, told.draw(14))
        found = told.session.forward(tree).logits.copy()
        if round % 4 == 0:
            np.testing.assert_array_equal(found, scored_at_once(model, told.text, tree))
        told.commit(tree)


def test_rows_of_shared_passes_score_as_chains_alone(model: LlamaCppModel, tokens: Tokens) -> None:
    """Trees of up to four conversations, which also go on alone, or beside a slice of a prompt."""
    drawn: Any = np.random.RandomState(6)
    all_told = [Told(model, drawn, tokens) for _ in range(4)]
    for told in all_told:
        told.read(60)
    for round in range(50):
        taking = [all_told[each] for each in drawn.permutation(4)[: drawn.randint(1, 5)]]
        trees = [random_tree(drawn, told.draw(9)) for told in taking]
        pairs = zip(taking, trees, strict=True)
        if len(taking) == 1:
            outs = [taking[0].session.forward(trees[0]).logits.copy()]
        else:
            parts = [PassPart(told.session, tree) for told, tree in pairs]
            if round % 2:
                trees[-1] = TokenTree.chain(7, taking[-1].draw(40))
                parts[-1] = PassPart(taking[-1].session, trees[-1], is_scored=False)
            outs = [out.logits for out in model.forward_together(parts, sum(map(len, trees)))]
        for told, tree, found in zip(taking, trees, outs, strict=True):
            if round % 2 and len(taking) > 1 and told is taking[-1]:
                told.session.commit(range(len(tree)))
                told.text += tree.tokens.tolist()
                continue
            if round % 3 == 0:
                np.testing.assert_array_equal(found, scored_at_once(model, told.text, tree))
            told.commit(tree)


@pytest.mark.parametrize("sizes", [(1,), (7, 64, 3), (400,)])
def test_however_a_prompt_is_divided_its_last_row_is_the_same(
    sizes: tuple[int, ...], model: LlamaCppModel, tokens: Tokens
) -> None:
    prompt, session = tokens(400), model.open_session()
    start = 0
    while start < len(prompt):
        end = start + sizes[start % len(sizes)]
        session.prefill(prompt[start:end])
        start = min(end, len(prompt))
    probe = TokenTree.chain(9, [8, 7])
    found = session.forward(probe).logits
    np.testing.assert_array_equal(found, scored_at_once(model, prompt, probe))


def test_a_text_does_not_depend_on_who_is_served_beside(model: LlamaCppModel) -> None:
    """Twenty texts of four conversations, with beginnings that are read once for several; each is
    what its conversation writes alone, without drafts."""
    path = str(model._weights._path)
    prompts = [f"The {'long ' * (number % 9)}story {number % 5}" * 3 for number in range(20)]
    options = LoadOptions(runtime="llamacpp", drafter="suffix,recycling", threads=2)
    with load_engine(path, options, quiet) as engine:
        assert engine.parts.speculation_factory.lossless.by_construction
        with engine.without_drafting():
            alone = [engine.generate(each, max_tokens=24).text for each in prompts]
        engines = [engine, *(engine.fork() for _ in range(3))]
        engine.parts.batch.prepare_for(4)
        engine.parts.batch.settle()
        assert engine.parts.batch.most > 1

        def answer(number: int) -> list[str]:
            mine = prompts[number::4]
            return [engines[number].generate(each, max_tokens=24).text for each in mine]

        with ThreadPoolExecutor(4) as pool:
            beside = list(pool.map(answer, range(4)))
        for each in engines[1:]:
            each.close()
    assert [beside[number % 4][number // 4] for number in range(20)] == alone

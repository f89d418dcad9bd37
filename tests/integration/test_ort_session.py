"""The onnxruntime session does what the reference session does, operation for operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError, SessionError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtModel, OrtRuntime
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tolerance

CONTEXT = 1024

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


class Both:
    """Does everything on both sessions and compares what they score."""

    def __init__(self, model: OrtModel, reference: ReferenceModel) -> None:
        self.sessions = (model.open_session(), reference.open_session())
        self._config = reference.config

    @property
    def length(self) -> int:
        found, expected = (session.length for session in self.sessions)
        assert found == expected
        return found

    def prefill(self, text: Sequence[int]) -> None:
        for session in self.sessions:
            session.prefill(text)

    def forward(self, tree: TokenTree) -> None:
        found, expected = (session.forward(tree) for session in self.sessions)
        assert found.logits.shape == expected.logits.shape
        positions = self.length + len(tree)
        for one, other in ((found.logits, expected.logits), (found.hidden, expected.hidden)):
            tolerance.require_float32(one, other, self._config, positions)

    def chain(self, text: Sequence[int]) -> None:
        self.forward(TokenTree.chain(text[0], text[1:]))

    def commit(self, rows: Sequence[int]) -> None:
        for session in self.sessions:
            session.commit(rows)

    def rollback(self, length: int) -> None:
        for session in self.sessions:
            session.rollback(length)


SHAPES = {
    "grouped": ("llama-llama3", {}),
    "stacked": (
        "llama-llama3",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    ),
    "stacked, normed heads": (
        "qwen3",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128},
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def bundle(
    request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """Of each form of attention that exporters/onnx/stacked.py tells of."""
    directory = tmp_path_factory.mktemp("long")
    variant, shape = SHAPES[request.param]
    model = tiny.build(variant, max_position_embeddings=CONTEXT + 1, **shape)
    source = open_checkpoint(tiny.write_hf(model, directory / "model"))
    options = ExportOptions("fp32", check=False)
    OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
    return open_bundle(directory / "out")


@pytest.fixture(scope="module")
def models(bundle: Bundle) -> tuple[OrtModel, ReferenceModel]:
    source = open_checkpoint(bundle.path.with_name("model"))
    return OrtRuntime().open(bundle, RuntimeOptions(threads=1)), ReferenceModel(source)


@pytest.fixture
def both(models: tuple[OrtModel, ReferenceModel]) -> Both:
    return Both(*models)


@pytest.mark.parametrize("sizes", [(1,) * 20, (256,), (257,), (300, 1, 270), (600,), (1020,)])
def test_a_prefill_of_any_size(sizes: tuple[int, ...], both: Both, tokens: Tokens) -> None:
    """One pass takes 256 tokens; the cache grows at 512."""
    for seed, size in enumerate(sizes):
        both.prefill(tokens(size, seed))
    assert both.length == sum(sizes)
    both.chain(tokens(4, seed=99))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_a_chain_of_any_width(rows: int, both: Both, tokens: Tokens) -> None:
    both.chain(tokens(rows))  # on an empty cache too
    both.commit(range(rows))
    both.chain(tokens(rows, seed=1))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_whose_path_is_kept(
    seed: int, both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    both.prefill(tokens(10, seed))
    for round in range(3):
        tree = random_tree(12, 10 * seed + round)
        both.forward(tree)
        path = max((tree.path(row) for row in range(12)), key=lambda path: path[-1] - len(path))
        assert path != list(range(len(path)))  # rows have to be moved
        both.commit(path)
    both.chain(tokens(4, seed))


@pytest.mark.parametrize("rows", [3, 8, 64])
def test_a_tree_on_an_empty_cache(
    rows: int, both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    """Where GroupQueryAttention counts positions by itself: siblings do not follow each other."""
    tree = random_tree(rows)
    assert not tree.is_chain
    both.forward(tree)
    both.commit(tree.path(rows - 1))
    both.chain(tokens(4))


def test_a_chain_after_a_tree_of_the_same_width(
    both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    """They share buffers: the tree's mask has to be gone, and may have lain elsewhere."""
    both.prefill(tokens(10))
    both.forward(random_tree(8))
    both.chain(tokens(8, seed=1))
    both.commit(range(3))
    both.chain(tokens(8, seed=2))
    both.forward(random_tree(8, seed=3))
    both.rollback(4)
    both.chain(tokens(8, seed=4))


def test_an_interrupted_tree_leaves_no_mask_behind(
    both: Both, tokens: Tokens, random_tree: RandomTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask's buffer is that of all passes of this width."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    both.prefill(tokens(20))
    both.chain(tokens(7, seed=1))  # the width is bound
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.sessions[0].forward(random_tree(7, seed=2))
    both.prefill(tokens(9, seed=3))
    both.chain(tokens(7, seed=4))


def test_the_cache_grows_under_a_tree(both: Both, tokens: Tokens, random_tree: RandomTree) -> None:
    both.prefill(tokens(500))
    both.forward(random_tree(8))  # binds buffers that then move
    both.forward(random_tree(16, seed=1))
    both.commit([0])
    both.prefill(tokens(30, seed=2))
    both.forward(random_tree(8, seed=3))


def test_a_rollback_and_what_is_built_on_it(both: Both, tokens: Tokens) -> None:
    both.prefill(tokens(40))
    both.chain(tokens(4, seed=1))
    both.commit(range(4))
    for length in (20, 20, 0):
        both.rollback(length)
        assert both.length == length
        both.chain(tokens(3, seed=2))
        both.commit(range(3))
        both.prefill(tokens(5, seed=3))
        both.chain(tokens(2, seed=4))


@pytest.mark.parametrize("seed", range(6))
def test_operations_in_any_order(
    seed: int, both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    random: Any = np.random.RandomState(seed)
    for step in range(15):
        kind = random.randint(4)
        if kind == 0 and both.length < 700:
            both.prefill(tokens(random.randint(1, 120), step))
        elif kind == 1:
            both.rollback(random.randint(both.length + 1))
        else:
            tree = random_tree(random.randint(1, 20), 100 * seed + step)
            both.forward(tree)
            both.commit(tree.path(random.randint(len(tree))))
    both.chain(tokens(5))


def test_two_sessions_of_one_model_do_not_meet(
    models: tuple[OrtModel, ReferenceModel],
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    first, second = Both(*models), Both(*models)
    first.prefill(tokens(30, seed=1))
    second.prefill(tokens(7, seed=2))
    for seed in range(3):
        for session in (first, second):
            session.forward(random_tree(6, seed))
            session.commit([0])
    first.sessions[0].close()
    second.chain(tokens(4))


def test_a_full_context_says_so_and_loses_nothing(both: Both, tokens: Tokens) -> None:
    both.prefill(tokens(CONTEXT - 2))
    session = both.sessions[0]
    for act in (lambda: session.prefill(tokens(3)), lambda: both.chain(tokens(3))):
        with pytest.raises(ContextFullError, match="1025 tokens do not fit the context of 1024"):
            act()
    both.chain(tokens(2))
    both.commit(range(2))
    assert both.length == CONTEXT
    with pytest.raises(ContextFullError):
        both.chain(tokens(1))


def test_more_rows_than_stated_are_refused(
    models: tuple[OrtModel, ReferenceModel], both: Both, tokens: Tokens
) -> None:
    most = models[0].capabilities.max_rows
    both.chain(tokens(most))
    with pytest.raises(ValueError, match=f"{most + 1} rows in one pass; at most {most}"):
        both.sessions[0].forward(TokenTree.chain(1, tokens(most)))


@pytest.mark.parametrize("length", [-1, 9])
def test_rolling_back_to_where_it_never_was_is_refused(
    length: int, both: Both, tokens: Tokens
) -> None:
    both.prefill(tokens(8))
    with pytest.raises(ValueError, match="roll back"):
        both.sessions[0].rollback(length)


def test_a_failure_inside_onnxruntime_is_one_line_and_leaves_the_session_usable(
    both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    both.prefill(tokens(8))
    tree = random_tree(6)
    tree.tokens[3] = 10_000  # no token of this model
    with pytest.raises(SessionError, match="6 rows at 8 tokens") as caught:
        both.sessions[0].forward(tree)
    assert "\n" not in str(caught.value)
    both.chain(tokens(6))
    both.forward(random_tree(6, seed=1))


def test_scores_stay_until_the_next_forward(both: Both, tokens: Tokens) -> None:
    """The session's own bookkeeping may not touch them: the decoder commits before it samples."""
    session = both.sessions[0]
    session.prefill(tokens(8))
    result = session.forward(TokenTree.chain(1, tokens(3)))
    before = result.logits.copy()
    session.commit([0, 1])
    session.rollback(9)
    np.testing.assert_array_equal(result.logits, before)


def test_a_closed_session_gives_its_memory_back_at_once(
    models: tuple[OrtModel, ReferenceModel], tokens: Tokens
) -> None:
    """An engine is part of a cycle, which Python may keep for hours: in a long run, forks that were
    closed took 6 MB each."""
    session = models[0].open_session()
    session.prefill(tokens(20))
    scores = session.forward(TokenTree.chain(1, [2, 3])).logits
    assert scores.base is not None
    buffer = weakref.ref(scores.base)
    del scores
    session.close()
    assert buffer() is None

"""A target and parts of it on one KV cache: whose tokens stand in it, and that no part changes
what the target scores."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.ort.model import OrtModel

CONTEXT = 1024

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


STACKED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture(
    scope="module",
    params=[("fp32", {}), ("int4", {}), ("int4", STACKED)],
    ids=["fp32", "int4", "int4 stacked"],
)
def model(
    request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> OrtModel:
    """Of three layers."""
    directory = tmp_path_factory.mktemp("shared")
    quantization, shape = request.param
    longest = CONTEXT + 1
    made = tiny.build("llama-llama3", num_hidden_layers=3, max_position_embeddings=longest, **shape)
    source = open_checkpoint(tiny.write_hf(made, directory / "hf"))
    options = ExportOptions(quantization, check=False)
    OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
    return OrtRuntime().open(open_bundle(directory / "out"), RuntimeOptions(threads=1))


def chain(tokens: list[int]) -> TokenTree:
    return TokenTree.chain(tokens[0], tokens[1:])


@pytest.mark.parametrize("seed", range(6))
def test_the_target_scores_as_if_it_had_no_parts(
    seed: int,
    model: OrtModel,
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    """Not a bit differs, whatever they do; from 480 tokens on, so that each makes the cache grow
    under the others' bindings."""
    random: Any = np.random.RandomState(seed)
    alone, target = model.open_session(), model.open_session()
    parts = [target.open_exit(2), target.open_skipping(frozenset({1, 4}))]
    for session in (alone, target):
        session.prefill(tokens(480))
    for step in range(12):
        for part in parts:
            use_at_random(part, random, tokens, random_tree)
        tree = random_tree(random.randint(1, 20), 100 * seed + step)
        kept = tree.path(random.randint(len(tree)))
        expected, found = alone.forward(tree), target.forward(tree)
        np.testing.assert_array_equal(found.logits, expected.logits)
        np.testing.assert_array_equal(found.hidden, expected.hidden)
        back = random.randint(4)
        for session in (alone, target):
            session.commit(kept)
            if step % 3 == 2:
                session.rollback(session.length - back)
        assert all(part.length == target.length for part in parts)


def use_at_random(part: Any, random: Any, tokens: Tokens, random_tree: RandomTree) -> None:
    start = part.length
    for _ in range(random.randint(3)):
        tree = random_tree(random.randint(1, 12), random.randint(1000))
        part.forward(tree)
        part.commit(tree.path(random.randint(len(tree))))
    if random.randint(2):
        part.rollback(random.randint(start, part.length + 1))
        part.prefill(tokens(random.randint(1, 40)))
    if random.randint(2):
        part.influence(tokens(10))
    if random.randint(2):
        part.rollback(random.randint(start))
        part.rollback(start)


@pytest.mark.parametrize("use", ["forward", "prefill", "influence"])
def test_a_part_does_not_overwrite_what_its_target_has_committed(
    use: str, model: OrtModel, tokens: Tokens
) -> None:
    target = model.open_session()
    target.prefill(tokens(10))
    part = target.open_skipping(frozenset({3}))
    part.rollback(9)
    with pytest.raises(ValueError, match="at 9 tokens would overwrite some of the 10"):
        getattr(part, use)(chain(tokens(2)) if use == "forward" else tokens(2))
    target.rollback(9)
    part.forward(chain(tokens(2)))


def test_rows_that_another_session_has_overwritten_are_not_committed(
    model: OrtModel, tokens: Tokens
) -> None:
    target = model.open_session()
    target.prefill(tokens(10))
    first, second = target.open_exit(1), target.open_exit(2)
    for session, other in ((target, first), (first, target), (first, second)):
        session.forward(chain(tokens(3)))
        other.forward(chain(tokens(1)))
        with pytest.raises(ValueError, match="the rows to commit are gone"):
            session.commit([0])
    first.forward(chain(tokens(3)))
    first.influence(tokens(3))
    with pytest.raises(ValueError, match="the rows to commit are gone"):
        first.commit([0])

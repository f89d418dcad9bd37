"""Parts of a model on its own KV cache: they score what they should, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint, first_layers
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tolerance

LAYERS, SUBLAYERS = 4, 8
CONTEXT = 1024
VARIANTS = ("llama-llama3", "llama-bias", "qwen3")

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


@dataclass(frozen=True)
class Made:
    source: StoredCheckpoint
    model: OrtModel
    path: Path  # of the bundle


@pytest.fixture(scope="session")
def made(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """made(quantization, variant, layers=LAYERS, still=()): sublayers in `still` add nothing."""

    @cache
    def make(
        quantization: str = "fp32",
        variant: str = VARIANTS[0],
        layers: int = LAYERS,
        still: tuple[int, ...] = (),
    ) -> Made:
        directory = tmp_path_factory.mktemp("made")
        shape = {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
        tiny_model = tiny.build(variant, **shape)
        tiny_model.weights["model.norm.weight"][:] = 1  # `hidden` is the residual stream, scaled
        for sublayer in still:
            last = ("self_attn.o_proj", "mlp.down_proj")[sublayer % 2]
            for kind in ("weight", "bias"):
                name = f"model.layers.{sublayer // 2}.{last}.{kind}"
                if name in tiny_model.weights:
                    tiny_model.weights[name][:] = 0
        source = first_layers(open_checkpoint(tiny.write_hf(tiny_model, directory / "hf")), layers)
        options = ExportOptions(quantization, check=False)
        OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
        bundle = open_bundle(directory / "out")
        model = OrtRuntime().open(bundle, RuntimeOptions(threads=1))
        return Made(source, model, bundle.path)

    return make


def chain(tokens: list[int]) -> TokenTree:
    return TokenTree.chain(tokens[0], tokens[1:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layers", [1, 3])
def test_an_exit_scores_as_a_model_of_the_first_layers(
    layers: int,
    variant: str,
    made: Callable[..., Made],
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    """After what its target has read, in chains and trees, and where it commits by itself."""
    target = made("fp32", variant).model.open_session()
    exit = target.open_exit(layers)
    model = ReferenceModel(first_layers(made("fp32", variant).source, layers))
    first = model.open_session()

    def compare(tree: TokenTree) -> None:
        found, expected = exit.forward(tree), first.forward(tree)
        positions = first.length + len(tree)
        for one, other in ((found.logits, expected.logits), (found.hidden, expected.hidden)):
            tolerance.require_float32(one, other, model.config, positions)

    compare(random_tree(6))  # on an empty cache
    target.prefill(tokens(30))
    first.prefill(tokens(30))
    compare(chain(tokens(1)))
    compare(chain(tokens(5)))
    compare(random_tree(12))
    for session in (exit, first):
        session.commit(random_tree(12).path(11))
    assert exit.length > target.length == 30
    compare(random_tree(7, seed=1))
    for session in (exit, first):
        session.prefill(tokens(20))
    compare(chain(tokens(2)))
    target.forward(chain(tokens(9, seed=3)))
    target.commit(range(9))
    first.rollback(30)
    first.prefill(tokens(9, seed=3))
    assert exit.length == 39
    compare(random_tree(5, seed=2))


@pytest.mark.parametrize("quantization", ["fp32", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_skipping_nothing_scores_as_the_target(
    variant: str,
    quantization: str,
    made: Callable[..., Made],
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    """The same nodes inside branches: not a bit differs."""
    target = made(quantization, variant).model.open_session()
    target.prefill(tokens(30))
    whole = target.open_skipping(frozenset())
    for tree in (chain(tokens(1)), chain(tokens(6)), random_tree(12)):
        expected = target.forward(tree).logits.copy()
        np.testing.assert_array_equal(whole.forward(tree).logits, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("skipped", [(0,), (1,), (2, 5), (3, 4, 7), tuple(range(SUBLAYERS))])
def test_what_is_skipped_adds_nothing(
    skipped: tuple[int, ...],
    variant: str,
    made: Callable[..., Made],
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    """As in a model whose sublayers end in zeros. It has to read the text itself: of what a whole
    model reads, later layers keep other keys and values."""
    session = made("fp32", variant).model.open_session().open_skipping(frozenset(skipped))
    model = ReferenceModel(made("fp32", variant, still=skipped).source)
    still = model.open_session()
    for each in (session, still):
        each.prefill(tokens(30))
    for tree in (chain(tokens(1)), chain(tokens(4)), random_tree(9)):
        found, expected = session.forward(tree).logits, still.forward(tree).logits
        tolerance.require_float32(found, expected, model.config, 30 + len(tree))


@pytest.mark.parametrize("layers", [-1, 0, LAYERS])
def test_an_exit_that_the_model_does_not_have_is_refused(
    layers: int, made: Callable[..., Made]
) -> None:
    with pytest.raises(UsageError, match=rf"after {layers} of {LAYERS} layers.*Choose 1 to 3"):
        made().model.open_session().open_exit(layers)


@pytest.mark.parametrize("sublayer", [-1, SUBLAYERS])
def test_a_sublayer_that_the_model_does_not_have_is_refused(
    sublayer: int, made: Callable[..., Made]
) -> None:
    session = made().model.open_session()
    with pytest.raises(UsageError, match=f"no sublayer {sublayer}. Choose from 0 to 7"):
        session.open_skipping(frozenset({1, sublayer}))
    part = session.open_skipping(frozenset({1}))
    with pytest.raises(UsageError, match=f"no sublayer {sublayer}"):
        part.skipped = frozenset({sublayer})
    assert part.skipped == {1}


def test_parts_of_all_sessions_share_one_copy_of_the_weights(
    made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the graph is what copies them."""
    bundle = open_bundle(made().path)
    loaded: list[str] = []
    file = Bundle.file
    monkeypatch.setattr(Bundle, "file", lambda self, name: loaded.append(name) or file(self, name))
    model = OrtRuntime().open(bundle, RuntimeOptions(threads=1))
    assert loaded == ["model.onnx"]
    for session in (model.open_session(), model.open_session()):
        session.open_exit(1)
        session.open_skipping(frozenset({3}))
    assert loaded == ["model.onnx", "partial.onnx"]

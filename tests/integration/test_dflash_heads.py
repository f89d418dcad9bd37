"""DFlash heads against their formulas written out, round after round; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.dflash import DFlashDrafter
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import Growth
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.heads import is_head
from edge_spec.exporters.reader import open_checkpoint
from fixtures import family_gguf, head_gguf, heads
from fixtures.dflash import BLOCK, MASK, SIZES, DFlash

LAYERS, VOCAB = 7, 265
SEED = 2  # of a random model from which 4 bits are not too far on any processor
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", SEED, num_hidden_layers=LAYERS)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


def _write(kind: str, path: Path) -> Path:
    if kind == "dspark in gguf":
        head, more = DFlash.with_transitions(LAYERS, VOCAB), {"block_size": BLOCK}
        inputs = [each + 1 for each in head.outputs]
        config = {**SIZES, **more, "mask_token_id": MASK}
        return head_gguf.write(path.with_suffix(".gguf"), "dflash", config, inputs, head.tensors)
    if kind == "eagle":
        return heads.draw(LAYERS, VOCAB, "p-eagle").write(path)
    head = DFlash.with_transitions if kind == "dspark" else DFlash
    return head(LAYERS, VOCAB).write(path)


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [
        *(("reference", "dflash"), ("ort", "dflash"), ("llamacpp", "dflash")),
        *(("ort", "dspark"), ("llamacpp", "dspark"), ("ort", "eagle"), ("llamacpp", "eagle")),
        ("llamacpp", "dspark in gguf"),
    ],
)
@pytest.mark.usefixtures("fixed_policy")
def test_greedy_texts_are_those_of_plain_decoding(
    runtime: str,
    kind: str,
    tiny: ModuleType,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second chain begins as plain decoding goes on, as a trained head's would."""
    path = target
    if runtime == "llamacpp":
        model = tiny.build("llama", SEED, num_hidden_layers=LAYERS)
        path = tiny.write_gguf(model, tmp_path / "t.gguf")
    opened: Callable[..., Any] = partial(edge_spec.load, str(path), runtime=runtime, threads=1)
    with opened(drafter="none") as engine:
        plain = [token.id for token in engine.generate(PROMPT, max_tokens=40).tokens]
    drafters = EagleDrafter if kind == "eagle" else DFlashDrafter
    proposed, observed = drafters.propose, drafters.observe

    def propose(self: Any, pending: int, budget: Budget) -> TokenTree:
        tree, at = proposed(self, pending, budget), len(self._target.text) - len(PROMPT)
        if at % 2 or len(tree) == 1:
            return tree
        return TokenTree.chain(pending, plain[at : at + 2], drafter=self.name)

    def observe(self: Any, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth = Growth(tree, (None,) * len(tree))
        observed(self, tree, out, verdict)

    monkeypatch.setattr(drafters, "propose", propose)
    monkeypatch.setattr(drafters, "observe", observe)
    head = _write(kind, tmp_path / "head")
    assert is_head(head)
    with opened(draft=str(head)) as engine:
        result = engine.generate(PROMPT, max_tokens=40)
    assert [token.id for token in result.tokens] == plain
    counts = result.stats.drafters["eagle" if kind == "eagle" else "dflash"]
    assert 0 < counts.draft_n_accepted < counts.draft_n


@pytest.mark.usefixtures("fixed_policy")
def test_a_dspark_head_drafts_for_a_model_with_convolutions(tmp_path: Path) -> None:
    """Its state of rejected draft tokens is taken back; what is accepted is what it writes."""
    target = family_gguf.write_gguf("lfm2", tmp_path / "t.gguf")
    config = open_checkpoint(target).config
    path = DFlash.with_transitions(config.num_layers, config.vocab_size).write(tmp_path / "head")
    texts = []
    for options in ({"drafter": "none"}, {"draft": str(path), "drafter": "dflash,suffix"}):
        with edge_spec.load(str(target), runtime="llamacpp", threads=1, **options) as engine:
            result = engine.generate(PROMPT, max_tokens=40)
        texts.append([token.id for token in result.tokens])
    assert texts[0] == texts[1]
    assert result.stats.drafters["dflash"].draft_n > 0


def _drop(name: str) -> Callable[[DFlash], object]:
    return lambda head: head.tensors.pop(name)


def _set(name: str, *shape: int) -> Callable[[DFlash], object]:
    return lambda head: head.tensors.update({name: np.zeros(shape, np.float32)})


def _markov(rank: int, tokens: int = VOCAB) -> Callable[[DFlash], object]:
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    return lambda head: head.tensors.update({n: np.zeros((tokens, rank), "f4") for n in names})


def _nothing(head: DFlash) -> None:
    """Leaves it as it is."""


REFUSED: dict[str, tuple[Callable[[DFlash], object], dict[str, Any], str]] = {
    "no block": (_nothing, {"block_size": 0}, "no usable block_size"),
    "mask": (_nothing, {"mask_token_id": VOCAB}, "mask token 265 is beyond the target's"),
    "other layers": (_nothing, {"target_layer_ids": [1, 3, 30]}, "[1, 3, 30]"),
    "another depth": (_nothing, {"num_target_layers": 36}, "of 36 layers"),
    "fewer features": (_nothing, {"target_layer_ids": [1, 3]}, "expected [64, 128]"),
    "window": (_nothing, {"sliding_window": 128}, "has a sliding window"),
    "missing": (_drop("layers.1.mlp.up_proj.weight"), {}, "layers.1.mlp.up_proj.weight is missing"),
    "shape": (_set("norm.weight", 3), {}, "norm.weight has the shape [3], expected [64]"),
    "unknown": (_set("selector.weight", 4, 4), {}, "selector.weight, which no known head has"),
    "no Markov head": (_nothing, {"markov_rank": 8}, "markov_head.markov_w1.weight is missing"),
    "its kind": (_markov(4), {"markov_head_type": "tree"}, "kind tree, which is not computed"),
    "its tokens": (_markov(4, 100), {}, "has the shape [100, 4], expected [265, 4]"),
    "projector": (_nothing, {"projector_type": "domino"}, "kind domino, which is not computed"),
    "newer": (_nothing, {"selector_rank": 8}, "states selector_rank, which is not computed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    case: str, target: Path, tmp_path: Path
) -> None:
    breaks, changes, told = REFUSED[case]
    head = DFlash(LAYERS, VOCAB)
    breaks(head)
    path = head.write(tmp_path / "head", **changes)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(target), runtime="reference", draft=str(path))
    assert told in caught.value.message and "\n" not in str(caught.value)

"""DFlash heads against their formulas written out, round after round; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.heads import DFlashHead, HeadBackend, HeadScores
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads import block
from edge_spec.drafters.heads.block import BlockDrafter
from edge_spec.drafters.heads.dflash import DFlashDrafter, DFlashNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import Growth
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.heads import is_head, open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import family_gguf, head_gguf, heads
from fixtures.dflash import BLOCK, MASK, SIZES, DFlash
from fixtures.head_drafting import FLOAT_BACKENDS, float_backend

LAYERS, VOCAB = 7, 265
SEED = 2  # of a random model from which 4 bits are not too far on any processor
PROMPT = [5, 6, 7, 8, 9, 10]
CHAIN = Budget(num_draft_tokens=BLOCK - 1, num_rows=BLOCK, branches=False)
ACCEPTED = (0, 2, 1, BLOCK - 1, 0)  # draft tokens of each round


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", SEED, num_hidden_layers=LAYERS)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


class Recording(DFlashDrafter):
    """Keeps all logits of a block."""

    def __init__(self, network: DFlashNetwork) -> None:
        super().__init__(network)
        self.seen: dict[int, np.ndarray] = {}

    def _ask(self, heads: Sequence[int]) -> HeadScores:
        found = super()._ask(heads)
        self.seen |= zip(heads, found.logits, strict=True)
        return found


class Rig:
    """A target on the reference with a head's drafter, driven by hand."""

    def __init__(
        self, source: StoredCheckpoint, head: DFlash, path: Path, backend: HeadBackend | None
    ) -> None:
        self.head, self.source = head, source
        self.text = list(PROMPT)
        self.model = ReferenceModel(source)
        self.session = self.model.open_session()
        read = open_head(path, source.config)
        assert isinstance(read, DFlashHead)
        self.layers = read.feature_layers
        self.drafter = Recording(DFlashNetwork(read, StoredTables(source), backend))
        self.drafter.attach(self.model, self.session)
        self.session.prefill(PROMPT[:-1])
        self.drafter.begin(PROMPT)

    def expected(self, window: int = 2048) -> np.ndarray:
        session, found = self.model.open_session(), []
        session.collect_features(self.layers, lambda _, rows: found.append(rows))
        session.prefill(self.text[:-1])
        embedding = self.source.float32("model.embed_tokens.weight")
        output = self.source.float32("lm_head.weight")
        features = np.concatenate(found)[-window:]
        text = self.text[-len(features) - 1 :]  # only distances of positions count
        return self.head.block_logits(text, features, embedding, output)

    def round(self, tree: TokenTree, accepted: int) -> None:
        """The first draft tokens are taken for accepted; then comes another than any drafted."""
        out = self.session.forward(tree)
        drafted = {int(token) for token in tree.tokens}
        written = [int(token) for token in tree.tokens[1 : 1 + accepted]]
        written.append(next(token for token in range(3, 250) if token not in drafted))
        verdict = Verdict(tuple(written), tuple(range(1, accepted + 1)), exhausted=False)
        self.session.commit(verdict.kept)
        self.drafter.observe(tree, out, verdict)
        self.text += written


@pytest.fixture(params=FLOAT_BACKENDS)
def rig(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Rig:
    head, backend = DFlash(LAYERS, VOCAB), float_backend(request.param)
    return Rig(open_checkpoint(target), head, head.write(tmp_path / "head"), backend)


def require_same(rig: Rig, window: int = 2048) -> None:
    """1e-4: float32 of sums of about a hundred terms, against float64, of the largest score."""
    expected = rig.expected(window)
    assert sorted(rig.drafter.seen) == list(range(BLOCK - 1))
    largest = max(1.0, float(np.abs(expected).max()))
    found = np.stack([rig.drafter.seen[row] for row in range(BLOCK - 1)])
    np.testing.assert_allclose(found, expected, atol=1e-4 * largest)


def test_each_draft_token_is_the_one_of_the_formulas(rig: Rig) -> None:
    for accepted in ACCEPTED:
        tree = rig.drafter.propose(rig.text[-1], CHAIN)
        require_same(rig)
        assert tree.tokens[1:].tolist() == rig.expected().argmax(axis=1).tolist()
        rig.round(tree, accepted)


def test_a_new_text_on_an_old_prefix_is_drafted_as_by_itself(rig: Rig) -> None:
    rig.round(rig.drafter.propose(rig.text[-1], CHAIN), 3)
    rig.drafter.propose(rig.text[-1], CHAIN)
    rig.session.rollback(4)
    rig.text = [*rig.text[:4], 99, 98, 97]
    rig.session.prefill(rig.text[4:-1])
    rig.drafter.begin(rig.text)
    rig.drafter.propose(rig.text[-1], CHAIN)
    require_same(rig)


def test_after_a_restored_state_nothing_is_drafted_until_the_target_has_read_a_token(
    rig: Rig,
) -> None:
    state = rig.drafter.state_dict()
    rig.drafter.load_state_dict(state)
    rig.drafter.begin(rig.text)
    assert len(rig.drafter.propose(rig.text[-1], CHAIN)) == 1
    rig.round(TokenTree.chain(rig.text[-1]), 0)
    assert len(rig.drafter.propose(rig.text[-1], CHAIN)) == BLOCK


def test_trees_hold_the_likeliest_of_each_row(rig: Rig) -> None:
    tree = rig.drafter.propose(rig.text[-1], Budget(num_draft_tokens=8, num_rows=9))
    likeliest = np.argsort(-rig.expected(), axis=1)[:, :8]
    for row in range(1, len(tree)):
        assert int(tree.tokens[row]) in likeliest[tree.depths[row] - 1]


def test_a_text_beyond_the_window_is_cut_to_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is read in pieces, and entries are moved once there are twice as many."""
    rig.drafter._window = 5
    monkeypatch.setattr(block, "_ROWS_AT_ONCE", 3)
    for accepted in (*ACCEPTED, 1):
        tree = rig.drafter.propose(rig.text[-1], CHAIN)
        require_same(rig, window=5)
        rig.round(tree, accepted)
    assert rig.drafter._first > 0


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
    proposed, observed = BlockDrafter.propose, BlockDrafter.observe

    def propose(self: BlockDrafter, pending: int, budget: Budget) -> TokenTree:
        tree, at = proposed(self, pending, budget), len(self._target.text) - len(PROMPT)
        if at % 2 or len(tree) == 1:
            return tree
        return TokenTree.chain(pending, plain[at : at + 2], drafter=self.name)

    def observe(self: BlockDrafter, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth = Growth(tree, (None,) * len(tree))
        observed(self, tree, out, verdict)

    monkeypatch.setattr(BlockDrafter, "propose", propose)
    monkeypatch.setattr(BlockDrafter, "observe", observe)
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
    "one token": (_nothing, {"block_size": 1}, "expected 2 to 64"),
    "mask": (_nothing, {"mask_token_id": VOCAB}, "mask token 265 is beyond the target's"),
    "no mask": (_nothing, {"mask_token_id": None}, "no usable mask_token_id"),
    "other layers": (_nothing, {"target_layer_ids": [1, 3, 30]}, "[1, 3, 30]"),
    "last layer": (_nothing, {"target_layer_ids": [1, 3, 6]}, "[1, 3, 6]"),
    "no layers": (_nothing, {"target_layer_ids": []}, "names no layers"),
    "another depth": (_nothing, {"num_target_layers": 36}, "of 36 layers"),
    "another vocabulary": (_nothing, {"vocab_size": 151936}, "its vocabulary has 151936 tokens"),
    "fewer features": (_nothing, {"target_layer_ids": [1, 3]}, "expected [64, 128]"),
    "window": (_nothing, {"sliding_window": 128}, "has a sliding window"),
    "missing": (_drop("layers.1.mlp.up_proj.weight"), {}, "layers.1.mlp.up_proj.weight is missing"),
    "no norm": (_drop("hidden_norm.weight"), {}, "hidden_norm.weight is missing"),
    "shape": (_set("norm.weight", 3), {}, "norm.weight has the shape [3], expected [64]"),
    "bias": (_set("fc.bias", 64), {}, "a tensor fc.bias, which no DFlash head has"),
    "unknown": (_set("selector.weight", 4, 4), {}, "no known head has, such as selector"),
    "half a Markov head": (_set("markov_w1.weight", 265, 4), {}, "markov_w2.weight is missing"),
    "no Markov head": (_nothing, {"markov_rank": 8}, "Markov head is missing, config.json states"),
    "its rank": (_markov(4), {"markov_rank": 8}, "is of rank 4, config.json states the rank 8"),
    "its kind": (_markov(4), {"markov_head_type": "tree"}, "kind tree, which is not computed"),
    "its gate": (_markov(4), {"markov_head_type": "gated"}, "gate_proj.weight is missing"),
    "its tokens": (_markov(4, 100), {}, "has the shape [100, 4], expected [265, 4]"),
    "confidence": (_nothing, {"enable_confidence_head": True}, "confidence_head.proj.weight is"),
    "its width": (
        _set("confidence_head.proj.weight", 1, 32),
        {},
        "proj.weight has the shape [1, 32], expected [1, 64]",
    ),
    "projector": (_nothing, {"projector_type": "domino"}, "kind domino, which is not computed"),
    "causal": (_nothing, {"is_causal": True}, "states is_causal, which is not computed"),
    "newer": (_nothing, {"selector_rank": 8}, "states selector_rank, which is not computed"),
    "width": (_nothing, {"hidden_size": 32}, "it shares tables of 32 numbers a row"),
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


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dflash", "DFlash from features 2, 4, 6, drafts 5 tokens a pass"),
        ("dspark", "DSpark from features 2, 4, 6, drafts 6 tokens a pass"),
        (
            "eagle",
            "P-EAGLE from features 2, 3, 4, drafts 4 tokens a pass, scores 132 of 265 tokens",
        ),
    ],
)
def test_a_head_says_what_it_is(kind: str, told: str, target: Path, tmp_path: Path) -> None:
    path = _write(kind, tmp_path / "head")
    read = open_head(path, open_checkpoint(target).config, has_weights=False)
    assert str(read) == told

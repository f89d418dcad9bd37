"""EAGLE heads of every format against their formulas written out, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.drafting import RowScores
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.heads import open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.reference.model import ReferenceSession
from fixtures import heads
from fixtures.head_drafting import float_backend

LAYERS = 7
PROMPT = np.random.default_rng(0).integers(3, 250, 12).tolist()
CHAIN = Budget(num_draft_tokens=3, num_rows=4, branches=False)
TREE = Budget(num_draft_tokens=6, num_rows=7)
SIBLINGS = 8  # that a draft offers at most after a row
ACCEPTED = (0, 2, 1, 3, 0)  # draft tokens of each round

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "safeailab": ("safeailab", {}),
    "specforge": ("specforge", {}),
    "speculators": ("speculators", {}),
    "normed residual": ("speculators", {"norm_before_residual": True}),
    "norm before fc": ("speculators", {"norm_before_fc": True}),
    "norm of each": ("speculators", {"fc_norm": True, "norm_output": True}),
    "stretched": ("speculators", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "magnified": (
        "safeailab",
        {"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 1.5}},
    ),
    "windowed": ("speculators", {"sliding_window": 5}),
    "deepseek": ("deepseek", {}),
    "mimo": ("mimo", {}),
    "qwen35": ("qwen35", {}),
    "eagle-1": ("eagle-1", {}),
}


class Tables:
    """A target's, from its checkpoint."""

    def __init__(self, source: StoredCheckpoint) -> None:
        self.embedding = source.float32("model.embed_tokens.weight")
        self.output = source.float32("lm_head.weight")

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self.embedding[tokens]

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        return self.output if tokens is None else self.output[tokens]


class Recording(EagleDrafter):
    """Keeps the last logits, of all tokens."""

    def _ranked(self, row: RowScores, path: Any) -> list[tuple[int, int]]:
        self.seen = row.spread(self._network.vocab_size)
        return super()._ranked(row, path)


@dataclass
class Rig:
    """A target with a head's drafter, driven by hand."""

    head: heads.Head
    tables: Tables
    model: ReferenceModel
    session: ReferenceSession
    network: LayersNetwork
    drafter: Recording
    text: list[int]

    def features(self) -> np.ndarray:
        """Of all tokens but the last, by the target in a single pass."""
        session = self.model.open_session()
        found: list[np.ndarray] = []
        session.collect_features(self.network.feature_layers, lambda _, rows: found.append(rows))
        session.prefill(self.text[:-1])
        return np.concatenate(found)

    def expected(self, drafted: list[int]) -> np.ndarray:
        features, tables = self.features(), self.tables
        return self.head.drafted_logits(
            [*self.text, *drafted], features, tables.embedding, tables.output
        )

    def round(self, tree: TokenTree, path: list[int]) -> None:
        """The target's pass; the rows of `path` are taken for accepted, then comes another token
        than any that was drafted."""
        out = self.session.forward(tree)
        written = [int(tree.tokens[row]) for row in path]
        drafted = {int(token) for token in tree.tokens}
        written.append(next(token for token in range(3, 250) if token not in drafted))
        verdict = Verdict(tuple(written), tuple(path), exhausted=False)
        self.session.commit(verdict.kept)
        self.drafter.observe(tree, out, verdict)
        self.text += written


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    model = tiny.build("llama", num_hidden_layers=LAYERS)
    return open_checkpoint(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


@pytest.fixture
def rig_of(target: StoredCheckpoint, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    def make(form: str, options: dict[str, Any], prompt: list[int] = PROMPT) -> Rig:
        head = heads.draw(LAYERS, target.config.vocab_size, form, **options)
        path = head.write(tmp_path / "head")
        tables = Tables(target)
        model = ReferenceModel(target)
        session = model.open_session()
        assert isinstance(session, ReferenceSession)
        network = LayersNetwork(open_head(path, target.config), tables, float_backend())
        drafter = Recording(network)
        drafter.attach(model, session)
        session.prefill(prompt[:-1])
        drafter.begin(prompt)
        return Rig(head, tables, model, session, network, drafter, list(prompt))

    yield make


def require_same(found: np.ndarray, expected: np.ndarray) -> None:
    """1e-4: float32 of sums of about a hundred terms, against float64; also of the largest score,
    since the states of EAGLE-1 grow without a norm."""
    scored = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), scored)
    largest = max(1.0, np.abs(expected[scored]).max())
    np.testing.assert_allclose(found[scored], expected[scored], atol=1e-4 * largest)


@pytest.mark.parametrize("case", CASES)
def test_each_draft_token_is_the_one_of_the_formulas(case: str, rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(*CASES[case])
    for accepted in ACCEPTED:
        tree = rig.drafter.propose(rig.text[-1], CHAIN)
        drafted = tree.tokens[1:].tolist()
        assert len(drafted) == 3
        for count in range(3):
            expected = rig.expected(drafted[:count])
            assert drafted[count] == expected.argmax()
        require_same(rig.drafter.seen, rig.expected(drafted[:2]))
        rig.round(tree, list(range(1, accepted + 1)))


def test_trees_hold_the_likeliest_after_each_path(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of("safeailab", {})
    for round_ in range(3):
        tree = rig.drafter.propose(rig.text[-1], TREE)
        assert not tree.is_chain
        for row in range(len(tree)):
            path = [
                int(tree.tokens[each]) for each in range(1, row + 1) if tree.ancestors[row, each]
            ]
            likeliest = np.argsort(-rig.expected(path))[:SIBLINGS].tolist()
            # In what order is learnt from what was accepted.
            assert {int(tree.tokens[child]) for child in tree.children(row)} <= set(likeliest)
        rig.round(tree, [tree.children(0)[0]] if round_ else [])


def test_a_new_text_on_an_old_prefix_is_drafted_as_by_itself(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of("safeailab", {})
    rig.round(rig.drafter.propose(rig.text[-1], CHAIN), [1, 2])
    rig.session.rollback(8)
    rig.text = [*rig.text[:8], 99, 98, 97]
    rig.session.prefill(rig.text[8:-1])
    rig.drafter.begin(rig.text)
    tree = rig.drafter.propose(rig.text[-1], CHAIN)
    require_same(rig.drafter.seen, rig.expected(tree.tokens[1:3].tolist()))


def test_draft_tokens_need_not_follow_each_other(rig_of: Callable[..., Rig]) -> None:
    """Each goes on from the path before it, whatever was scored in between."""
    rig = rig_of("safeailab", {})
    for path in [(), (20,), (20, 30), (40,), (40, 50), (20, 60), (40, 50, 60)]:
        scores = rig.drafter._score(path).spread(rig.network.vocab_size)
        require_same(scores, rig.expected(list(path)))

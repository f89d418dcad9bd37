"""Heads that draft several tokens a pass, against what their published code drafts in its own loop:
fixtures/make_head_vectors.py. The same head in other packages drafts the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead
from edge_spec.drafters.draft.synced_session import Path as Drafted
from edge_spec.drafters.heads.dflash import DFlashDrafter
from edge_spec.drafters.heads.drafting import RowScores
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.heads import is_head, open_head, says_head
from fixtures import head_gguf, heads, tiny_models
from fixtures.head_drafting import float_backend

VECTORS = Path(__file__).resolve().parents[1] / "fixtures" / "head_vectors.npz"
DEEPSPEC = ("deepspec-vanilla", "deepspec-none")
KINDS = (*DEEPSPEC, "p-eagle")
TARGET = ModelConfig(
    architecture="qwen3",
    num_layers=9,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=48,
    context_length=2048,
    norm_epsilon=1e-6,
    rope_theta=1e4,
)
Tensors = dict[str, np.ndarray]
Repackage = Callable[[dict[str, Any], Tensors, Any], tuple[dict[str, Any], Tensors]]


@pytest.fixture(scope="module")
def vectors() -> Mapping[str, np.ndarray]:
    return dict(np.load(VECTORS))


class Tables:
    """Of a head that shares them with its target."""

    def __init__(self, tensors: Tensors) -> None:
        self._embedding = tensors["embed_tokens.weight"].astype(np.float32)
        self._output = tensors["lm_head.weight"].astype(np.float32)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self._embedding[tokens]

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        return self._output if tokens is None else self._output[tokens]


def stored(vectors: Mapping[str, np.ndarray], kind: str) -> tuple[dict[str, Any], Tensors]:
    prefix = f"{kind}/tensor/"
    tensors = {n.removeprefix(prefix): each for n, each in vectors.items() if n.startswith(prefix)}
    return json.loads(str(vectors[f"{kind}/config"])), tensors


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    kinds = {"float16": "F16", "int64": "I64", "bool": "BOOL"}
    named = {name: (kinds[str(each.dtype)], each) for name, each in tensors.items()}
    (directory / "model.safetensors").write_bytes(tiny_models.safetensors(named))
    return directory


def drafter_of(path: Path, tensors: Tensors) -> RecordingDFlash | RecordingEagle:
    head, tables = open_head(path, TARGET), Tables(tensors)
    network = LayersNetwork(head, tables, float_backend())
    recording = RecordingDFlash if isinstance(head, DFlashHead) else RecordingEagle
    drafter: RecordingDFlash | RecordingEagle = recording(network)
    drafter.seen = {}
    return drafter


class RecordingDFlash(DFlashDrafter):
    """Keeps what is said after a path: logits of all tokens, and the chance to be accepted."""

    seen: dict[int, tuple[np.ndarray, float | None]]

    def _ranked(self, row: RowScores, path: Drafted) -> list[tuple[int, int]]:
        logits, chance = row.logits.copy(), None
        weights = self._transitions
        if weights is not None:
            last = path[-1] if path else self._pending
            logits[row.likeliest] += weights.weighed(row, last)[1]
            chance = weights.chance(last, row.state)
        self.seen[len(path)] = row._replace(logits=logits).spread(self._vocab_size), chance
        return super()._ranked(row, path)


class RecordingEagle(EagleDrafter):
    seen: dict[int, tuple[np.ndarray, float | None]]

    def _ranked(self, row: RowScores, path: Drafted) -> list[tuple[int, int]]:
        self.seen[len(path)] = row.spread(self._vocab_size), None
        return super()._ranked(row, path)


def require_published(
    vectors: Mapping[str, np.ndarray], kind: str, drafter: Any, scored: np.ndarray | None = None
) -> None:
    """scored: tokens that the head scores, where not all."""
    told = {name: vectors[f"{kind}/{name}"] for name in ("text", "features", "starts", "tokens")}
    logits, chances = vectors[f"{kind}/logits"], vectors[f"{kind}/chances"]
    read, count = 0, logits.shape[1]
    drafter._acceptance.estimate = lambda kind: 1.0  # it drafts as many tokens as it may
    for index, start in enumerate(told["starts"].tolist()):
        drafter.seen = {}
        drafter._target.text = told["text"][: start + 1].tolist()
        features = told["features"][read:start].astype(np.float32)
        drafter._target.store.put(read, features)
        tree = drafter.propose(int(told["text"][start]), Budget(count, count + 1, branches=False))
        assert tree.tokens[1:].tolist() == told["tokens"][index].tolist()
        for depth in range(count):
            found, chance = drafter.seen[depth]
            expected = logits[index][depth]
            among = slice(None) if scored is None else scored
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(found[among], expected[among], atol=1e-5 * largest)
            if chances.size:
                assert chance == pytest.approx(chances[index][depth], abs=1e-5)
        read = start


@pytest.mark.parametrize("kind", KINDS)
def test_heads_draft_as_their_published_code(
    kind: str, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config, tensors = stored(vectors, kind)
    path = write(tmp_path / "head", config, tensors)
    assert says_head(path / "config.json") and is_head(path)
    require_published(vectors, kind, drafter_of(path, tensors))


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "p-eagle"])
@pytest.mark.parametrize("parted", [0, 1, 2, 6])  # tokens before the pending one
def test_after_a_text_with_other_tokens_at_its_end_a_head_drafts_as_without(
    kind: str, parted: int, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    path = write(tmp_path / "head", *stored(vectors, kind))
    drafter = drafter_of(path, stored(vectors, kind)[1])
    start = int(vectors[f"{kind}/starts"][0])
    right = vectors[f"{kind}/text"][: start + 1].tolist()
    features = vectors[f"{kind}/features"][:start].astype(np.float32)
    first = start - parted
    other = [*right[:first], *((token + 1) % 48 for token in right[first:])]
    expected = vectors[f"{kind}/logits"][0]
    drafter._acceptance.estimate = lambda kind: 1.0  # type: ignore[method-assign]
    for text in (other, right, right):
        from_here = 0 if text is other else first
        wrong = 0.5 * (text is other) * (np.arange(start) >= first)[:, None]
        drafter._target.store.put(from_here, (features + wrong)[from_here:].astype(np.float32))
        drafter.begin(text)
        drafter.propose(text[-1], Budget(len(expected), len(expected) + 1, branches=False))
        found = np.stack([drafter.seen[depth][0] for depth in range(len(expected))])
        is_expected = np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
        assert is_expected == (text is right)


@pytest.mark.parametrize("kind", DEEPSPEC)
def test_the_best_path_of_a_tree_is_what_published_code_drafts(
    kind: str, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    """Of a tree in which tokens follow each other in several ways, each is weighed by those before
    it."""
    config, tensors = stored(vectors, kind)
    path = write(tmp_path / "head", config, tensors)
    drafter = drafter_of(path, tensors)
    start, drafted = int(vectors[f"{kind}/starts"][0]), vectors[f"{kind}/tokens"][0].tolist()
    drafter._target.text = vectors[f"{kind}/text"][: start + 1].tolist()
    drafter._target.store.put(0, vectors[f"{kind}/features"][:start].astype(np.float32))
    drafter._acceptance.estimate = lambda kind: 0.24  # type: ignore[method-assign]
    tree = drafter.propose(drafter._target.text[-1], Budget(len(drafted), 800, branches=True))
    row, children = 0, {}
    for each in range(1, len(tree)):
        children.setdefault(int(tree.parents[each]), []).append(each)
    for token in drafted:
        among = children[row]
        row = next(each for each in among if int(tree.tokens[each]) == token)
        assert row == among[0]  # the likeliest one stands first


def _in_one_place(config: dict[str, Any], vectors: Any) -> dict[str, Any]:
    """Returns config.json of Liquid AI and SpecForge."""
    names = ("mask_token_id", "target_layer_ids", "num_target_layers")
    apart = {name: config[name] for name in names}
    rest = {name: value for name, value in config.items() if name not in names}
    return rest | {"dflash_config": apart}


def _lfm2(config: dict[str, Any], tensors: Tensors, _: Any) -> tuple[dict[str, Any], Tensors]:
    """Shares the target's tables, and turns neighbouring numbers as pairs."""
    apart = {n: t for n, t in tensors.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    for name, each in apart.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            halves = each.reshape(-1, 2, config["head_dim"] // 2, *each.shape[1:])
            apart[name] = halves.swapaxes(1, 2).reshape(each.shape)
    told = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    config = {n: v for n, v in config.items() if n != "confidence_head_with_markov"}
    return _in_one_place(config | told, None), apart


def _specforge(config: dict[str, Any], tensors: Tensors, _: Any) -> tuple[dict[str, Any], Tensors]:
    config = _in_one_place(config | {"architectures": ["DSparkDraftModel"]}, None)
    config["dflash_config"] |= {"projector_type": "dspark", "markov_rank": config["markov_rank"]}
    return config, {f"model.{name}": each for name, each in tensors.items()}


def _speculators(
    config: dict[str, Any], tensors: Tensors, ids: np.ndarray
) -> tuple[dict[str, Any], Tensors]:
    """Scores some tokens alone."""
    sizes = {name: config[name] for name in config if name not in ("markov_rank", "block_size")}
    top = {name: config[name] for name in ("block_size", "mask_token_id", "markov_rank")}
    top |= {"transformer_layer_config": sizes, "draft_vocab_size": len(ids)}
    top |= {"speculators_model_type": "dspark", "sample_from_anchor": True}
    top["aux_hidden_state_layer_ids"] = [each + 1 for each in config["target_layer_ids"]]
    cut = {n: tensors[n][ids] for n in ("lm_head.weight", "markov_head.markov_w2.weight")}
    named = {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(48), ids)}
    return top, tensors | cut | named


PACKAGES: dict[str, Repackage] = {
    "lfm2": _lfm2,
    "specforge": _specforge,
    "speculators": _speculators,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_same_head_in_another_package_drafts_the_same(
    package: str, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    kind = "deepspec-vanilla"
    config, tensors = stored(vectors, kind)
    drafted = np.unique(vectors[f"{kind}/tokens"])
    ids = np.unique(np.concatenate([drafted, np.arange(20, 40)]))  # a head of few tokens
    path = write(tmp_path / "head", *PACKAGES[package](config, tensors, ids))
    assert says_head(path / "config.json") and is_head(path)
    drafter = drafter_of(path, tensors)
    require_published(vectors, kind, drafter, ids if package == "speculators" else None)


@pytest.mark.parametrize("package", ["its own tables", "the target's", "some tokens"])
def test_the_same_head_in_a_gguf_file_drafts_the_same(
    package: str, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    kind, ids, metadata = "deepspec-vanilla", None, {}
    config, tensors = stored(vectors, kind)
    told = {name: each for name, each in tensors.items()}
    if package != "its own tables":
        told = {n: t for n, t in told.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    if package == "some tokens":
        ids = np.unique(np.concatenate([vectors[f"{kind}/tokens"].ravel(), np.arange(20, 40)]))
        told["lm_head.weight"] = tensors["lm_head.weight"][ids]
        told["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids]
        told["d2t"], metadata = ids, {"sample_from_anchor": True}
    inputs = [each + 1 for each in config["target_layer_ids"]]
    path = head_gguf.write(tmp_path / "h.gguf", "dflash", config, inputs, told, **metadata)
    assert is_head(path)
    require_published(vectors, kind, drafter_of(path, tensors), ids)


def test_an_eagle_head_in_a_gguf_file_is_read_as_in_safetensors(tmp_path: Path) -> None:
    head = heads.draw(9, 48, "safeailab", norm_before_fc=True)
    target = replace(TARGET, hidden_size=heads.HIDDEN)
    published = head.write(tmp_path / "head", norm_before_fc=True)
    config = json.loads((published / "config.json").read_text())
    tensors = {n: t for n, t in head.stored().items() if n != "t2d"} | {"d2t": head.ids}
    path = head_gguf.write(
        tmp_path / "h.gguf", "eagle3", config, head.inputs, tensors, norm_before_fc=True
    )
    assert is_head(path)
    ours, theirs = open_head(path, target), open_head(published, target)
    assert isinstance(ours, EagleHead) and isinstance(theirs, EagleHead)
    assert str(ours) == str(theirs)
    np.testing.assert_array_equal(ours.token_ids, head.ids)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[name], theirs.tensors[name], name)


GGUF_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window": ({"attention__sliding_window": 9}, {}, "has a sliding window"),
    "causal": ({"attention__causal": True}, {}, "states is_causal, which is not computed"),
    "scaled": ({"rope__scaling__type": "yarn"}, {}, "scales its rotary embedding by 'yarn'"),
    "softcap": ({"final_logit_softcapping": 30.0}, {}, "states final_logit_softcapping"),
    "activation": ({"hidden_activation": "gelu"}, {}, "an activation other than silu"),
    "sinks": ({}, {"layers.0.attn_sinks.weight": np.zeros(4, "f4")}, "which no known head has"),
    "width": ({}, {"fc.weight": np.zeros((16, 32), "f4")}, "expected [16, 48]"),
    "ids": ({}, {"d2t": np.array([47, 48])}, "one beyond the target's vocabulary of 48"),
    "ids twice": ({}, {"d2t": np.array([7, 7])}, "d2t names a token twice"),
    "no ids": ({}, {"d2t": np.zeros(2, "f4")}, "d2t is no list of 64-bit numbers"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_a_gguf_file_with_another_head_is_refused_in_one_line(
    case: str, vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    metadata, more, told = GGUF_REFUSED[case]
    config, tensors = stored(vectors, "deepspec-vanilla")
    path = head_gguf.write(
        tmp_path / "h.gguf", "dflash", config, [2, 5, 8], tensors | more, **metadata
    )
    with pytest.raises(EdgeSpecError) as caught:
        open_head(path, TARGET)
    assert told in caught.value.message and "\n" not in str(caught.value)


def test_a_gguf_file_with_a_head_is_no_model(
    vectors: Mapping[str, np.ndarray], tmp_path: Path
) -> None:
    config, tensors = stored(vectors, "deepspec-vanilla")
    path = head_gguf.write(tmp_path / "h.gguf", "dflash", config, [2, 5, 8], tensors)
    for runtime in ("reference", "llamacpp"):
        with pytest.raises(EdgeSpecError, match="a trained head, which is no model of its own"):
            edge_spec.load(str(path), runtime=runtime)

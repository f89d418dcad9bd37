"""With a head, texts are those of plain decoding: greedy ones token for token, samples in law."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.heads import FLOAT_BITS, ComputesHeads, DFlashHead, HeadBackend, MedusaHead
from edge_spec.core.model import Runtime
from edge_spec.core.rope import RopeScaling
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.heads.dflash import DFlashDrafter
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.independent import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.engine import Engine
from edge_spec.errors import EdgeSpecError, MissingDependencyError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.heads import open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredBackend, StoredTables
from edge_spec.models import runtimes
from edge_spec.models.draft_choice import place_of
from edge_spec.models.runtimes import load_runtime
from edge_spec.models.source import Source
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.reference.model import ReferenceSession
from fixtures import family_gguf, head_gguf, heads, tiny_models
from fixtures import text_distribution as text
from fixtures.dflash import BLOCK, MASK, SIZES, DFlash
from fixtures.head_drafting import oblige

LAYERS, VOCAB = 7, 265
SEED = 2  # of a random model from which 4 bits are not too far on any processor
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("llama", SEED, num_hidden_layers=LAYERS)
    return Path(tiny.write_hf(model, tmp_path_factory.mktemp("target") / "hf"))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return heads.draw(LAYERS, VOCAB, "safeailab").write(tmp_path / "head")


@pytest.fixture(params=["reference", "ort", "llamacpp"])
def opened(
    request: pytest.FixtureRequest, tiny: ModuleType, target: Path, tmp_path: Path
) -> Callable[..., Engine]:
    """opened(drafter, ...): the target, by a runtime."""
    options: dict[str, Any] = {"runtime": request.param, "threads": 1}
    path = target
    if request.param == "llamacpp":
        path = tiny.write_gguf(
            tiny.build("llama", SEED, num_hidden_layers=LAYERS), tmp_path / "t.gguf"
        )
    return partial(edge_spec.load, str(path), **options)


@pytest.fixture
def plain(opened: Callable[..., Engine]) -> list[int]:
    with opened(drafter="none") as engine:
        return [token.id for token in engine.generate(PROMPT, max_tokens=60).tokens]


def _write(kind: str, path: Path) -> Path:
    """A head of the kind."""
    if kind == "dspark in gguf":
        head, more = DFlash.with_transitions(LAYERS, VOCAB), {"block_size": BLOCK}
        inputs = [each + 1 for each in head.outputs]
        config = {**SIZES, **more, "mask_token_id": MASK}
        return head_gguf.write(path.with_suffix(".gguf"), "dflash", config, inputs, head.tensors)
    if kind.startswith("d"):
        make = DFlash if kind == "dflash" else DFlash.with_transitions
        changes = {"block_size": 1} if kind == "dspark of one token" else {}
        return make(LAYERS, VOCAB).write(path, **changes)
    return heads.draw(LAYERS, VOCAB, kind).write(path)


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        *(("safeailab", "auto"), ("safeailab", "eagle"), ("p-eagle", "auto")),
        *(("dflash", "auto"), ("dspark", "auto"), ("dspark in gguf", "auto")),
        ("dspark of one token", "auto"),
    ],
)
@pytest.mark.usefixtures("fixed_policy")
def test_greedy_texts_are_those_of_plain_decoding(
    kind: str,
    drafter: str,
    plain: list[int],
    opened: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = _write(kind, tmp_path / "head")
    is_block = kind.startswith("d")
    oblige(monkeypatch, PROMPT, plain, DFlashDrafter if is_block else EagleDrafter)
    with opened(drafter=drafter, draft=str(head)) as engine:
        result = engine.generate(PROMPT, max_tokens=60)
        assert [token.id for token in result.tokens] == plain
        counts = result.stats.drafters["dflash" if is_block else "eagle"]
        assert 0 < counts.draft_n_accepted < counts.draft_n
        again = engine.generate(PROMPT[:4], max_tokens=20)  # on a part of the old text
        assert again.stats.predicted_n == 20


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


def test_a_target_that_gives_no_features_has_no_head(
    monkeypatch: pytest.MonkeyPatch, target: Path, head: Path
) -> None:
    monkeypatch.delattr(ReferenceSession, "collect_features")
    with pytest.raises(EdgeSpecError, match="which this runtime does not give"):
        edge_spec.load(str(target), runtime="reference", draft=str(head))


@pytest.fixture
def by_heart(opened: Callable[..., Engine], plain: list[int], tmp_path: Path) -> Path:
    """Medusa heads that know the target's text after PROMPT, but for every third token."""
    with opened(drafter="none") as engine:
        session = engine.parts.model.open_session()
        session.prefill(PROMPT[:-1])
        out = session.forward(TokenTree.chain(PROMPT[-1], plain[:49]))
        assert out.hidden is not None
        states = out.hidden.copy()  # fewer than their width: they can be told apart
        session.close()
    return heads.write_medusa(tmp_path / "medusa", states, np.array(plain[:50]), VOCAB)


@pytest.mark.usefixtures("fixed_policy")
@pytest.mark.parametrize(("drafter", "bits"), [("auto", 8), ("medusa", 8), ("medusa", 4)])
def test_medusa_heads_draft_what_they_were_made_for(
    drafter: str,
    bits: int,
    plain: list[int],
    opened: Callable[..., Engine],
    by_heart: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their matrices are rounded to so many bits, and what they have learnt survives it."""
    if bits == 4:
        monkeypatch.setattr("edge_spec.loader.head.WIDE", 1)
    with opened(drafter=drafter, draft=str(by_heart)) as engine:
        result = engine.generate(PROMPT, max_tokens=50)
        assert [token.id for token in result.tokens] == plain[:50]
        counts = result.stats.drafters["medusa"]
        assert counts.draft_n_accepted >= 20  # none, were they off by one
        assert counts.draft_n_accepted < counts.draft_n


@pytest.mark.usefixtures("fixed_policy")
@pytest.mark.parametrize("draft", [None, "auto"])
@pytest.mark.parametrize("opened", ["reference"], indirect=True)
def test_heads_that_were_trained_here_draft_as_long_as_they_can_be_opened(
    draft: str | None,
    plain: list[int],
    opened: Callable[..., Engine],
    target: Path,
    by_heart: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    kept = place_of(Source(str(target), lambda what, fraction: None), "medusa")
    shutil.copytree(by_heart, kept)
    (kept / "report.json").write_text('{"pays": true, "forecast": {"speedup": 1.5}}')

    def drafters() -> list[str]:
        with opened(draft=draft) as engine:
            result = engine.generate(PROMPT, max_tokens=50)
            assert [token.id for token in result.tokens] == plain[:50]
            return [each.name for each in engine.parts.speculation.drafters]

    assert "medusa" in drafters() and "does not draft" not in caplog.text

    def has_no_onnxruntime(name: str) -> Runtime:
        if name == "ort":
            raise MissingDependencyError("onnxruntime is missing", remedy="Install it.")
        return load_runtime(name)

    with monkeypatch.context() as patched:
        patched.setattr(runtimes, "load_runtime", has_no_onnxruntime)
        assert "medusa" not in drafters()
    assert caplog.text.count("does not draft: onnxruntime is missing") == 1
    (kept / "medusa_lm_head.safetensors").write_bytes(b"damaged")
    assert "medusa" not in drafters() and caplog.text.count("--draft none leaves it out") == 2


def _sharing(directory: Path, ids: np.ndarray, **changes: np.ndarray | None) -> Path:
    """Two heads that share an output matrix over these tokens of the target."""
    random = np.random.default_rng(0)
    stored: dict[str, np.ndarray | None] = {
        "lm_head.weight": random.standard_normal((len(ids), 64))
    }
    for index in range(2):
        stored[f"{index}.0.linear.weight"] = random.standard_normal((64, 64)) * 0.05
        stored[f"{index}.0.linear.bias"] = random.standard_normal(64) * 0.05
    stored |= {name.replace("__", "."): each for name, each in changes.items()}
    kinds = {n: ("F32", each.astype(np.float32)) for n, each in stored.items() if each is not None}
    if "d2t" not in changes:
        kinds["d2t"] = ("I64", ids - np.arange(len(ids)))
    directory.mkdir()
    (directory / "config.json").write_text('{"medusa_num_heads": 2}')
    (directory / "model.safetensors").write_bytes(tiny_models.safetensors(kinds))
    return directory


@pytest.mark.usefixtures("fixed_policy")
def test_medusa_heads_that_share_a_matrix_keep_the_text(
    plain: list[int], opened: Callable[..., Engine], tmp_path: Path
) -> None:
    path = _sharing(tmp_path / "head", np.unique(plain))
    with opened(drafter="medusa", draft=str(path)) as engine:
        result = engine.generate(PROMPT, max_tokens=20)
    assert [token.id for token in result.tokens] == plain[:20]
    assert result.stats.drafters["medusa"].draft_n > 0


SHARING_REFUSED: dict[str, tuple[dict[str, np.ndarray | None], list[int], str]] = {
    "no ids": ({"d2t": None}, [1, 2], "tensor d2t is missing"),
    "floats": ({"d2t": np.zeros(2)}, [1, 2], "d2t is no list of 64-bit numbers"),
    "beyond": ({}, [1, VOCAB], "one beyond the target's vocabulary"),
    "twice": ({}, [5, 5], "d2t names a token twice"),
    "rows": ({"lm_head__weight": np.zeros((3, 64))}, [1, 2], "expected [2, 64]"),
    "gap": ({"0__0__linear__bias": None}, [1, 2], "0.0.linear.bias is missing"),
}


@pytest.mark.parametrize("case", SHARING_REFUSED)
def test_medusa_heads_that_share_a_wrong_matrix_are_refused(
    case: str, target: Path, tmp_path: Path
) -> None:
    changes, ids, told = SHARING_REFUSED[case]
    path = _sharing(tmp_path / "head", np.array(ids), **changes)
    with pytest.raises(EdgeSpecError) as caught:
        open_head(path, open_checkpoint(target).config)
    assert told in caught.value.message


MEDUSA_REFUSED: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "too many": ({"0__extra": np.zeros(3, np.float32)}, "no known head has"),
    "another block": ({"1__2__linear__bias": np.zeros(64, np.float32)}, "no known head has"),
    "width": ({"0__0__linear__bias": np.zeros(63, np.float32)}, "expected [64]"),
    "gap": ({"3__1__weight": np.zeros((VOCAB, 64), np.float32)}, "2.0.linear.weight is missing"),
}


@pytest.mark.parametrize("case", MEDUSA_REFUSED)
def test_medusa_heads_that_do_not_fit_are_refused(case: str, target: Path, tmp_path: Path) -> None:
    changes, told = MEDUSA_REFUSED[case]
    states = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    path = heads.write_medusa(tmp_path / "head", states, np.arange(40), VOCAB, **changes)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(target), runtime="reference", draft=str(path))
    assert told in caught.value.message


def _backend(bits: int) -> HeadBackend:
    runtime = load_runtime("ort")
    assert isinstance(runtime, ComputesHeads)
    return StoredBackend(runtime, bits)


def _drafter(
    kind: str, source: StoredCheckpoint, vocab: int, backend: HeadBackend, folder: Path
) -> Drafter:
    """With a random head of the kind in the folder, or in the target's own for mtp."""
    path = folder / "head"
    if kind == "medusa":
        states = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
        heads.write_medusa(path, states, np.arange(40) % vocab, vocab)
    elif kind == "shared medusa":
        _sharing(path, np.arange(vocab - 2))
    elif kind == "dflash":
        DFlash(LAYERS, vocab).write(path)
    elif kind == "dspark":
        DFlash.with_transitions(LAYERS, vocab).write(path)
    elif kind == "mtp":
        path = folder / "hf"
    else:
        form = "safeailab" if kind == "eagle" else kind
        heads.draw(LAYERS, vocab, form).write(path)
    read = open_head(path, source.config)
    if isinstance(read, MedusaHead):
        return MedusaDrafter(MedusaNetwork(read, backend))
    network = LayersNetwork(read, StoredTables(source), backend)
    return (DFlashDrafter if isinstance(read, DFlashHead) else EagleDrafter)(network)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "branches"),
    [
        # Each has its own way from scores to the probabilities that drafts are drawn by. (What
        # scores are, with which heads and bits, is another file's.)
        ("eagle", FLOAT_BITS, True),
        ("eagle", 4, False),
        ("medusa", 8, True),
        ("dflash", FLOAT_BITS, False),
        ("dspark", FLOAT_BITS, True),
        ("p-eagle", 8, True),
    ],
)
def test_samples_have_the_distribution_of_the_target(
    kind: str, bits: int, branches: bool, tiny: ModuleType, tmp_path: Path
) -> None:
    vocab = 8
    model = tiny.build("llama", num_hidden_layers=LAYERS, vocab_size=vocab)
    if kind == "mtp":
        model.config.update({"num_nextn_predict_layers": 1, "rope_theta": heads.THETA})
        model.weights.update(heads.draw(LAYERS, vocab, "deepseek").stored())
    source = open_checkpoint(tiny.write_hf(model, tmp_path / "hf"))
    drafter = _drafter(kind, source, vocab, _backend(bits), tmp_path)
    params = SamplingParams(temperature=3.0)
    session = ReferenceModel(source).open_session()
    scorer = ReferenceModel(source).open_session()
    prompt = (1, 2, 3, 4)

    drafter.attach(ReferenceModel(source), session)
    sampler = Sampler(SamplingParams(temperature=3.0, seed=5), prompt, sampled_drafts=True)
    shape = (-1, 0, 0, 1) if branches and kind.startswith("eagle") else ()
    budget = Budget(3, 4, branches=branches, shape=shape)
    found = text.sampled_texts(drafter, session, prompt, sampler, budget, 800)
    assert found.num_accepted > 200  # otherwise nothing was tried
    expected = text.joint(text.logits_of(scorer), prompt, params)
    assert text.p_value(found.counts, expected) > text.SMALLEST_P


Broken = Callable[[Any], object]  # is given a head to change


def _drop(name: str) -> Broken:
    return lambda head: head.tensors.pop(name)


def _shift(by: int) -> Broken:
    return lambda head: head.ids.__iadd__(by)


def _set(name: str, *shape: int) -> Broken:
    return lambda head: head.tensors.update({name: np.zeros(shape, np.float32)})


def _narrow(head: Any) -> None:
    """All that has the head's own width, but for what shares the target's tables."""
    for name, values in head.tensors.items():
        own = [32 if size == 64 else size for size in values.shape]
        head.tensors[name] = np.zeros(own, np.float32)


def _markov(rank: int, tokens: int = VOCAB) -> Broken:
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    return lambda head: head.tensors.update({n: np.zeros((tokens, rank), "f4") for n in names})


Refused = dict[str, tuple[Broken, dict[str, object], str]]
EAGLE_REFUSED: Refused = {
    "missing": (
        _drop("self_attn.q_proj.weight"),
        {},
        "layers.0.self_attn.q_proj.weight is missing",
    ),
    "too many": (_set("mlp.extra.weight", 2, 2), {}, "no known head has"),
    "shape": (_set("norm.weight", 3), {}, "norm.weight has the shape [3], expected [64]"),
    "vocabulary": (_shift(200), {}, "d2t names a token twice, or one beyond"),
    "width": (_set("fc.weight", 64, 96), {}, "a head for another target"),
    "activation": (id, {"hidden_act": "gelu"}, "an activation other than silu"),
    "newer kind": (id, {"speculators_model_type": "domino"}, "a head of the kind domino"),
    "no mask token": (_set("mask_hidden", 1, 192), {}, "no usable ptd_token_id"),
    "rope": (id, {"rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
    "narrow": (
        _narrow,
        {"hidden_size": 32, "head_dim": 16},
        "it shares tables of 32 numbers a row",
    ),
    "other tokens": (id, {"vocab_size": 32000}, "its vocabulary has 32000 tokens"),
    "epsilon": (id, {"rms_norm_eps": float("nan")}, "no usable rms_norm_eps"),
    "some windows": (
        id,
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        "a sliding window in some of its layers",
    ),
}
DFLASH_REFUSED: Refused = {
    "no block": (id, {"block_size": 0}, "no usable block_size"),
    "mask": (id, {"mask_token_id": VOCAB}, "mask token 265 is beyond the target's"),
    "other layers": (id, {"target_layer_ids": [1, 3, 30]}, "[1, 3, 30]"),
    "another depth": (id, {"num_target_layers": 36}, "of 36 layers"),
    "fewer features": (id, {"target_layer_ids": [1, 3]}, "expected [64, 128]"),
    "window": (id, {"sliding_window": 128}, "has a sliding window"),
    "missing": (_drop("layers.1.mlp.up_proj.weight"), {}, "layers.1.mlp.up_proj.weight is missing"),
    "shape": (_set("norm.weight", 3), {}, "norm.weight has the shape [3], expected [64]"),
    "unknown": (_set("selector.weight", 4, 4), {}, "selector.weight, which no known head has"),
    "no Markov head": (id, {"markov_rank": 8}, "markov_head.markov_w1.weight is missing"),
    "its kind": (_markov(4), {"markov_head_type": "tree"}, "kind tree, which is not computed"),
    "a gated one": (
        lambda head: [each(head) for each in (_markov(4), _set("markov_head.gate_proj.bias", 4))],
        {"markov_head_type": "gated"},
        "kind gated, which is not computed",
    ),
    "its tokens": (_markov(4, 100), {}, "has the shape [100, 4], expected [265, 4]"),
    "projector": (id, {"projector_type": "domino"}, "kind domino, which is not computed"),
    "newer": (id, {"selector_rank": 8}, "states selector_rank, which is not computed"),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("eagle", each) for each in EAGLE_REFUSED), *(("dflash", each) for each in DFLASH_REFUSED)],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    kind: str, case: str, target: Path, tmp_path: Path
) -> None:
    breaks, changes, told = (EAGLE_REFUSED if kind == "eagle" else DFLASH_REFUSED)[case]
    is_eagle = kind == "eagle"
    head: Any = heads.draw(LAYERS, VOCAB, "safeailab") if is_eagle else DFlash(LAYERS, VOCAB)
    breaks(head)
    path = head.write(tmp_path / "head", **changes)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(target), runtime="reference", draft=str(path))
    assert told in caught.value.message and "\n" not in str(caught.value)
    if case == "shape":
        assert "its own target" in caught.value.remedy


@pytest.mark.parametrize("runtime", ["ort", "llamacpp"])
def test_another_targets_head_is_refused_before_the_target_is_converted(
    runtime: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion may take minutes."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    head = heads.draw(LAYERS, VOCAB, "safeailab").write(
        tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 3, 9]
    )
    told: list[str] = []
    with pytest.raises(EdgeSpecError, match="drafts from the inputs of the layers"):
        edge_spec.load(
            str(target),
            runtime=runtime,
            draft=str(head),
            progress=lambda what, _: told.append(what),
        )
    assert not told  # a conversion tells how far it is


@pytest.mark.parametrize("form", [*heads.FORMATS, "pickled", "dflash"])
def test_a_head_in_the_place_of_a_model_is_refused_in_one_line(form: str, tmp_path: Path) -> None:
    if form == "dflash":
        path = DFlash(LAYERS, VOCAB).write(tmp_path / "head")
    else:
        # As they are published: some say that they are models of this type.
        published = "eagle-1" if form == "pickled" else form
        path = heads.draw(LAYERS, VOCAB, published).write(tmp_path / "head", model_type="llama")
    if form == "pickled":
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="is a trained head, which is no model of its own") as told:
        edge_spec.load(str(path))
    assert "--draft" in told.value.remedy


@pytest.mark.parametrize("form", ["safeailab", "eagle-1"])  # config.json of the latter has no mark
def test_pickled_weights_are_not_opened(form: str, target: Path, tmp_path: Path) -> None:
    head = heads.draw(LAYERS, VOCAB, form).write(tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(EdgeSpecError, match="pickled") as caught:
        edge_spec.load(str(target), runtime="reference", draft=str(head))
    assert "Convert them to safetensors" in caught.value.remedy


@pytest.mark.parametrize("room", ["rope_scaling", "rope_parameters"])
def test_rotary_frequencies_are_scaled_as_is_stated(
    room: str, target: Path, tmp_path: Path
) -> None:
    """Heads for Llama 3.1 have its scaling; transformers 5 states it beside the base."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    }
    head = heads.draw(LAYERS, VOCAB, "safeailab").write(
        tmp_path / "head", **{"rope_theta": 5e5, room: scaling}
    )
    config = open_head(head, open_checkpoint(target).config).config
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drafter": "eagle"}, "needs a trained head of its kind"),
        ({"drafter": "suffix", "draft": "HEAD"}, "would not be used"),
        ({"draft": ["HEAD", "HEAD"]}, "two heads"),
        ({"draft": ["HEAD", "TARGET"]}, "without other drafts"),
        ({"draft": "HEAD", "draft_threads": 1}, "for a draft, and there is none"),
    ],
)
def test_options_that_a_head_contradicts_are_refused(
    options: dict[str, object], told: str, target: Path, head: Path
) -> None:
    names = {"HEAD": str(head), "TARGET": str(target)}
    if isinstance(draft := options.get("draft"), list):
        options = options | {"draft": [names[each] for each in draft]}
    elif draft is not None:
        options = options | {"draft": names[str(draft)]}
    with pytest.raises(EdgeSpecError, match=told):
        edge_spec.load(str(target), runtime="reference", **options)

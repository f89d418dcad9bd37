"""Every family computes what transformers computes for it, in every runtime that runs it.

The logits come from tests/fixtures/families.py: tiny models, all of whose parameters are random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Model, RuntimeOptions, SelfDrafting
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.reference import arithmetic
from edge_spec.testing import check_session, check_sharing
from fixtures import families
from fixtures import tiny_models as tiny
from fixtures.family_gguf import FORMS, hf_as_gguf, write_gguf
from fixtures.side_by_side import scores_of
from fixtures.tolerance import float32_tolerance

FAMILIES = families.NAMES
# What GGUF has no key for, and the window of Phi-3, which llama.cpp does not have.
UNSTATED = {"gemma2": ["attention_scale"], "gemma3": ["attention_scale"], "phi3": ["layer_kinds"]}
CONTEXT = 48  # tokens: enough for the texts, and short for the session's check, which fills it

Opened = Callable[[str, str], Model]  # of a family, in a runtime


@pytest.fixture(scope="module")
def model(
    family: Callable[[str], StoredCheckpoint], family_bundle: Callable[[str], Bundle]
) -> Opened:
    @cache
    def opened(name: str, runtime: str) -> Model:
        source = family(name) if runtime == "reference" else family_bundle(name)
        options = RuntimeOptions(context_length=CONTEXT)
        made: Model = runtimes.load_runtime(runtime).open(source, options)
        return made

    return opened


RUNTIMES = ("reference", "ort")
# With the others, they have the same matrices and caches; all are asked in the slow suite.
ALIKE = {
    *("granite4", "minicpm", "olmo2", "exaone4-small", "qwen3moe-raw", "gpt-oss-floats"),
    *("lfm2moe-raw", "t5", "mbart", "pegasus", "m2m100", "gemma4-dense", "lfm2-wide"),
}


def of_each_kind(*names: str) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.slow if each in ALIKE else ()) for each in names]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_texts_in_one_tree_score_as_transformers_scores_them(
    name: str, runtime: str, model: Opened
) -> None:
    """The rows of both texts stand side by side in the cache, farther apart than the window."""
    expected = families.load(name)
    first, second = expected.texts
    start = families.FIRST_SCORED
    session = model(name, runtime).open_session()
    session.prefill(first[:start].tolist())
    length = families.NUM_TOKENS
    parents = [-1, *range(length - start - 1)]
    parents += [families.SHARED - start - 1, *range(length - start, length - start + 7)]
    tokens = np.concatenate([first[start:], second[families.SHARED :]])
    tree = TokenTree(tokens, np.array(parents), np.ones(len(tokens)))
    require_near(session.forward(tree).logits, name, model(name, runtime))
    session.commit([*range(families.SHARED - start), *range(length - start, len(tree))])
    session.rollback(start)
    require_near(session.forward(tree).logits, name, model(name, runtime))
    session.close()


@pytest.mark.parametrize(
    "name",
    of_each_kind(
        *(name for name in FAMILIES if families.model_type(name) not in families.SOURCE_TYPES)
    ),
)
def test_conversations_share_passes(name: str, model: Opened) -> None:
    """Each with its own windows: of a pass that several share, too."""
    shared = model(name, "ort")
    magnitude = float(np.abs(families.load(name).logits).max())
    check_sharing(shared, 5 * float32_tolerance(shared.config, CONTEXT, magnitude))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "marian", "t5", "t5-gated"])
def test_what_transformers_scored_is_what_it_scores(name: str) -> None:
    """In whichever version is installed: what others are compared with is kept."""
    for library in ("torch", "transformers"):
        pytest.importorskip(library)
    _, found = families.computed(name)
    expected = families.load(name).logits
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    print(f"{name} transformers: {np.abs(found - expected).max():.1e}")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token_scores_as_transformers_scores_it(
    name: str, runtime: str, model: Opened
) -> None:
    expected = families.load(name)
    found = []
    for text, start in zip(expected.texts, (families.FIRST_SCORED, families.SHARED), strict=True):
        session = model(name, runtime).open_session()
        session.prefill(text[:start].tolist())
        for token in text[start:].tolist():
            found.append(session.forward(TokenTree.chain(token)).logits[0].copy())
            session.commit([0])
        session.close()
    require_near(np.array(found), name, model(name, runtime))


@pytest.mark.parametrize("runtime", ["ort", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", of_each_kind(*FAMILIES))
def test_a_family_passes_the_conformance_suite(name: str, runtime: str, model: Opened) -> None:
    opened = model(name, runtime)
    magnitude = float(np.abs(families.load(name).logits).max())
    check_session(opened, 5 * float32_tolerance(opened.config, CONTEXT, magnitude))


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "lfm2", "gemma4", "gemma4-experts"])
def test_a_part_of_a_model_drafts_with_its_windows_and_positions(name: str, model: Opened) -> None:
    """With nothing left out, it is the whole model."""
    target = model(name, "ort").open_session()
    assert isinstance(target, SelfDrafting)
    text = families.texts()[0].tolist()
    target.prefill(text[:12])
    part = target.open_skipping(frozenset())
    chain = TokenTree.chain(text[12], text[13:])
    expected = target.forward(chain).logits.copy()
    np.testing.assert_array_equal(part.forward(chain).logits, expected)
    part.close()
    target.close()


@pytest.mark.parametrize(
    ("name", "prefix", "parts"),
    [
        ("gemma3", "language_model.model.", ["vision_tower.model"]),
        ("gemma3", "model.language_model.", ["model.vision_tower"]),
        (
            "gemma4",
            "model.language_model.",
            [f"model.{each}" for each in ("vision_tower", "embed_vision", "audio_tower")],
        ),
    ],
)
def test_the_text_model_of_one_that_sees_and_hears_is_taken(
    name: str,
    prefix: str,
    parts: list[str],
    family: Callable[[str], StoredCheckpoint],
    tmp_path: Path,
) -> None:
    alone, directory = families.load(name), tmp_path / "model"
    families.write_hf(name, directory)
    seen = {"use_bidirectional_attention": "vision"} if name == "gemma4" else {}
    config = {"model_type": name, "text_config": {**alone.config, **seen}, "vision_config": {}}
    tiny.write_json(directory / "config.json", config)
    stored = {
        tensor.replace("model.", prefix, 1): ("F32", values)
        for tensor, values in alone.weights.items()
    }
    stored |= {f"{part}.weight": ("F32", np.ones((2, 2), np.float32)) for part in parts}
    (directory / "model.safetensors").write_bytes(tiny.safetensors(stored))
    found, expected = open_checkpoint(directory), family(name)
    assert found.config == expected.config
    for tensor in expected.names():
        np.testing.assert_array_equal(found.float32(tensor), expected.float32(tensor))


@pytest.mark.parametrize("name", FORMS)
def test_a_gguf_file_is_the_model_that_its_directory_is(
    name: str, family: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    stored = open_checkpoint(write_gguf(name, tmp_path / "model.gguf"))
    expected = family(name)
    if FORMS[name].changes:
        expected = open_checkpoint(hf_as_gguf(name, tmp_path / "model"))
    for tensor in expected.names():
        np.testing.assert_allclose(stored.float32(tensor), expected.float32(tensor), rtol=1e-6)
    found = stored.config.to_dict() | {"architecture": expected.config.architecture}
    unstated = UNSTATED.get(name, ())
    for values in (found, described := expected.config.to_dict()):
        for key in unstated:
            values.pop(key, None)
    assert rounded(found) == rounded(described)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "gpt-oss"])
def test_llama_cpp_scores_a_gguf_file_as_the_reference_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    known = arithmetic.ACTIVATIONS | {"gelu_tanh": gelu_of_a_table}
    monkeypatch.setattr(arithmetic, "ACTIVATIONS", known)
    path = write_gguf(name, tmp_path / "model.gguf")
    options = RuntimeOptions(context_length=64, kv_type="f32", flash_attention=False)
    stored = open_checkpoint(path)
    exact = runtimes.load_runtime("reference").open(stored, RuntimeOptions())
    llama = runtimes.load_runtime("llamacpp").open(runtimes.open_model_info(path), options)
    chain = families.texts()[0].tolist()
    scores = [scores_of(model, chain) for model in (exact, llama)]
    bound = float32_tolerance(exact.config, len(chain), float(np.abs(scores[0]).max()))
    if exact.config.activation == "gelu_tanh":  # whose rounding to float16 is on an edge for some
        off = np.abs(of_single_tokens(llama) - of_single_tokens(exact)).max(axis=-1)
        assert np.median(off) <= bound / 10  # of rows without any
        bound *= 20 if exact.config.experts is None else 40  # more numbers, and so more edges
    np.testing.assert_allclose(scores[1], scores[0], atol=bound, rtol=0)
    print(f"{name} llamacpp: {np.abs(scores[1] - scores[0]).max():.1e}, allowed {bound:.1e}")
    llama.close()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_stretched_rotation_is_that_of_llama_cpp(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    scaling: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    scaling = {f"{name}__rope__scaling__{key}": value for key, value in scaling.items()}
    path = tiny.write_gguf(tiny.build(name), tmp_path / "model.gguf", **scaling)
    stored = runtimes.open_model_info(path)
    options = RuntimeOptions(context_length=64, kv_type="f32", flash_attention=False)
    exact = runtimes.load_runtime("reference").open(stored, RuntimeOptions())
    llama = runtimes.load_runtime("llamacpp").open(stored, options)
    chain = families.texts()[0].tolist()
    expected, found = (scores_of(model, chain) for model in (exact, llama))
    bound = float32_tolerance(exact.config, len(chain), float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, atol=bound, rtol=0)
    llama.close()


def of_single_tokens(model: Model) -> np.ndarray:
    """The scores after each text of one token, of the first ones."""
    session = model.open_session()
    tokens = range(49)
    scores = [session.forward(TokenTree.chain(token)).logits[0].copy() for token in tokens]
    session.close()
    return np.array(scores)


def gelu_of_a_table(gate: np.ndarray) -> np.ndarray:
    """As ggml has it on processors: of float16, and rounded to it, between -10 and 10."""
    looked_up = arithmetic.gelu_tanh(gate.astype(np.float16).astype(np.float32))
    table = looked_up.astype(np.float16).astype(np.float32)
    return np.where(gate <= -10, np.float32(0), np.where(gate >= 10, gate, table))


def rounded(described: Any) -> Any:
    """Numbers to five digits: GGUF has them as float32, and some as their reciprocals."""
    if isinstance(described, dict):
        return {key: rounded(value) for key, value in described.items()}
    if isinstance(described, list | tuple):
        return [rounded(value) for value in described]
    return float(f"{described:.5g}") if isinstance(described, float) else described


def require_near(found: np.ndarray, name: str, opened: Model) -> None:
    """Within 1e-4, or what the order of sums explains of logits as large as these."""
    expected = families.load(name).logits
    bound = float32_tolerance(opened.config, families.NUM_TOKENS, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, atol=min(bound, 1e-4), rtol=0)
    runtime = type(opened).__module__.split(".")[2]
    print(f"{name} {runtime}: {np.abs(found - expected).max():.1e}, allowed {bound:.1e}")

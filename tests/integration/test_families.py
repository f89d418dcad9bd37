"""Every family computes what transformers computes for it, in every runtime that runs it.

The logits come from tests/fixtures/families.py: tiny models, all of whose parameters are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.testing import check_session
from fixtures import families
from fixtures.tolerance import float32_tolerance

FAMILIES = tuple(families.CONFIGS)
CONTEXT = 48  # tokens: enough for the texts, and short for the session's check, which fills it

Opened = Callable[[str, str], Model]  # of a family, in a runtime


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StoredCheckpoint]:
    @cache
    def opened(name: str) -> StoredCheckpoint:
        directory = tmp_path_factory.mktemp("families") / name
        return open_checkpoint(families.write_hf(name, directory))

    return opened


@pytest.fixture(scope="module")
def model(
    checkpoint: Callable[[str], StoredCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Opened:
    @cache
    def opened(name: str, runtime: str) -> Model:
        options = RuntimeOptions(context_length=CONTEXT)
        loaded = runtimes.load_runtime(runtime)
        if runtime == "reference":
            return loaded.open(checkpoint(name), options)
        out = tmp_path_factory.mktemp("bundle") / name
        how = ExportOptions(quantization="fp32", check=False)
        OnnxExporter().export(checkpoint(name), out, how, lambda what, done: None)
        return loaded.open(open_bundle(out), options)

    return opened


RUNTIMES = ("reference", "ort")


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


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_passes_the_conformance_suite(name: str, runtime: str, model: Opened) -> None:
    opened = model(name, runtime)
    magnitude = float(np.abs(families.load(name).logits).max())
    check_session(opened, 5 * float32_tolerance(opened.config, CONTEXT, magnitude))


def require_near(found: np.ndarray, name: str, opened: Model) -> None:
    """Within 1e-4, or what the order of sums explains of logits as large as these."""
    expected = families.load(name).logits
    bound = float32_tolerance(opened.config, families.NUM_TOKENS, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, atol=min(bound, 5e-4), rtol=0)
    print(f"{name}: {np.abs(found - expected).max():.1e}, allowed {bound:.1e}")

"""Every drafter, pair, head and family writes and drafts what it did when the golden files were
made."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden import exports, real, texts
from golden.make import difference, stored


@pytest.mark.parametrize("runtime", texts.RUNTIMES)
def test_drafters_on_one_model(runtime: str) -> None:
    assert difference(stored("texts")["drafters"][runtime], texts.of_runtime(runtime)) == ""


@pytest.mark.parametrize("runtime", texts.RUNTIMES)
def test_a_draft_of_its_target(runtime: str) -> None:
    assert difference(stored("texts")["pairs"][runtime], texts.of_pair(runtime)) == ""


def test_heads_of_published_formats() -> None:
    assert difference(stored("texts")["heads"], texts.of_heads()) == ""


@pytest.mark.parametrize(
    "names", [exports.QUICK, pytest.param(texts.families.NAMES, marks=pytest.mark.slow)]
)
def test_families(names: tuple[str, ...]) -> None:
    expected = {name: stored("texts")["families"][name] for name in names}
    assert difference(expected, texts.of_families(names)) == ""


@pytest.mark.model
def test_the_demo_model(demo_gguf: Path) -> None:
    found = real.of_real(demo_gguf, runtime="llamacpp")
    assert real.first_difference(stored("real")["demo"], real.ids(found)) == ""


@pytest.mark.slow
def test_a_coder(coder_gguf: Path) -> None:
    found = real.of_real(coder_gguf, runtime="llamacpp")
    assert real.first_difference(stored("real")["coder-0.5b"], real.ids(found)) == ""


def test_a_near_tie_alone_excuses_another_token() -> None:
    recorded = [[[5, 2.0], [6, 0.1], [7, 2.0]]]
    assert real.first_difference(recorded, [[5, 9, 9]]) == ""
    assert "token 0: 5 was recorded, 4 came" in real.first_difference(recorded, [[4, 6, 7]])
    assert "token 2" in real.first_difference(recorded, [[5, 6, 8]])

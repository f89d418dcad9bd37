"""The first promise, on the real model: speculation does not change the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edge_spec
from edge_spec.core.tree import TokenTree
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS
from edge_spec.scheduler.lossless import Promise
from edge_spec.scheduler.machine import cpu_features, cpu_name

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("free_rows")]

PROMPTS = [
    json.loads(line)["prompt"]
    for line in Path("benchmarks/prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
SOME = PROMPTS[7:26:6]  # a summary, a sum, a story, a repetition


@pytest.fixture(autouse=True)
def padding_is_cheap(monkeypatch):
    """What a second row takes is measured, and tests run beside each other."""
    monkeypatch.setattr("edge_spec.scheduler.lossless.MOST_PADDING", 10.0)


def answers(count: int, runtime: str = "ort", **options) -> dict[str, list[list[int]]]:
    """Plain and drafted answers of one engine."""
    found = {}
    loaded = LoadOptions(runtime=runtime, drafter="none", **options)
    with load_engine("smollm2", loaded, lambda what, fraction: None) as engine:
        for drafter in ("none", "suffix"):
            engine.set_drafter(drafter)
            results = [engine.chat(prompt, max_tokens=count) for prompt in SOME]
            found[drafter] = [[token.id for token in result.tokens] for result in results]
    # Otherwise the comparison would prove nothing.
    assert sum(result.stats.draft_n_accepted for result in results) > count // 2
    return found


@pytest.mark.slow  # ONNX: the conversion takes most of a minute
def test_int4_rows_are_bit_identical_from_the_plain_width_on(demo_gguf):
    """On every processor; which width that is depends on its kernels."""
    with edge_spec.load(runtime="ort") as engine:
        found = engine.parts.batch_invariance
        lossless = engine.parts.speculation_factory.lossless
    assert lossless.promise is Promise.BIT_IDENTICAL, cpu_name()
    assert lossless.widths == USUAL_WIDTHS[lossless.plain_width - 1 :], cpu_name()
    # A single row has kernels of its own where there is no AVX-512 VNNI.
    assert lossless.plain_width <= (1 if "AVX512_ICL" in cpu_features() else 2), cpu_name()
    assert (lossless.plain_width == 1) == (found.tie_margin == 0), cpu_name()
    assert found.probe_invariant and not found.branch_invariant  # see docs/how-it-works.md


# The two differ in what they do where rows are not bit-identical, which few processors show.
@pytest.mark.slow
@pytest.mark.parametrize("lossless", ["auto", "always"])
def test_drafting_changes_no_token(demo_gguf, lossless):
    found = answers(48, lossless=lossless)
    assert found["suffix"] == found["none"]


def test_drafting_changes_no_token_where_the_file_runs_as_it_is(demo_gguf):
    found = answers(48, runtime="auto")
    assert found["suffix"] == found["none"]


@pytest.mark.slow
def test_where_ties_are_allowed_texts_part_at_near_ties_only(demo_gguf):
    found = answers(64, lossless="ties")
    with edge_spec.load(runtime="ort", drafter="none", lossless="ties") as engine:
        noise = engine.parts.batch_invariance.tie_margin
        for prompt, plain, other in zip(SOME, found["none"], found["suffix"], strict=True):
            if plain == other:
                continue
            at = int(np.argmin([a == b for a, b in zip(plain, other, strict=False)]))
            session = engine.parts.model.open_session()
            before = engine.chat_prompt(prompt) + plain[:at]
            session.prefill(before[:-1])
            logits = session.forward(TokenTree.chain(before[-1])).logits[0]
            # Noise is a measured maximum over a sample; twice it allows for what that missed.
            assert abs(logits[plain[at]] - logits[other[at]]) < 2 * noise


def test_sampled_text_is_the_same_with_and_without_speculation(demo_gguf):
    sampling = edge_spec.SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    texts = []
    with edge_spec.load(exact=True) as engine:
        for drafter in ("none", "suffix"):
            engine.set_drafter(drafter)
            results = [engine.chat(p, max_tokens=32, sampling=sampling) for p in SOME[-2:]]
            texts.append([result.text for result in results])
    assert texts[0] == texts[1]

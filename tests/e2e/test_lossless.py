"""The first promise, on the real model: speculation does not change the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edge_spec
from edge_spec.control.batch_invariance import EXACT_WIDTHS
from edge_spec.core.tree import TokenTree
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("free_rows")]

PROMPTS = [
    json.loads(line)["prompt"]
    for line in Path("benchmarks/prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
SOME = PROMPTS[4:26:3]  # translation, summary, question, sum, code, story, repetition


def answers(drafter: str, prompts: list[str], count: int, **options) -> list[list[int]]:
    loaded = LoadOptions(drafter=drafter, **options)
    with load_engine("smollm2", loaded, lambda what, fraction: None) as engine:
        results = [engine.chat(prompt, max_tokens=count) for prompt in prompts]
    if drafter != "none":  # otherwise the comparison would prove nothing
        assert sum(result.stats.draft_n_accepted for result in results) > count // 2
    return [[token.id for token in result.tokens] for result in results]


def test_int4_rows_are_bit_identical_at_every_width(demo_gguf):
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx512_vnni" not in cpuinfo.read_text():
        pytest.skip("measured on AVX-512 VNNI only: other kernels may do otherwise")
    with edge_spec.load(exact=True) as engine:
        batch_invariance = engine.parts.batch_invariance
    assert batch_invariance.tie_margin == 0 and batch_invariance.invariant_widths == EXACT_WIDTHS
    assert (
        batch_invariance.branch_margin > 0 and not batch_invariance.branch_invariant
    )  # see docs/lossless.md


def test_exact_mode_is_bit_identical_on_int4(demo_gguf):
    plain = answers("none", SOME, 64, exact=True)
    assert answers("suffix", SOME, 64, exact=True) == plain


@pytest.mark.slow
def test_fp32_text_is_equal(demo_gguf):
    plain = answers("none", SOME[:4], 48, quantization="fp32")
    assert answers("suffix", SOME[:4], 48, quantization="fp32") == plain


@pytest.mark.slow
def test_int4_text_differs_at_near_ties_only(demo_gguf):
    drafted = answers("suffix", SOME, 64)
    with edge_spec.load(drafter="none") as engine:
        noise = engine.parts.batch_invariance.tie_margin
        for prompt, other in zip(SOME, drafted, strict=True):
            plain = [token.id for token in engine.chat(prompt, max_tokens=64).tokens]
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
    for drafter in ("none", "suffix"):
        with edge_spec.load(drafter=drafter, exact=True) as engine:
            results = [engine.chat(p, max_tokens=48, sampling=sampling) for p in SOME[-3:]]
            texts.append([result.text for result in results])
    assert texts[0] == texts[1]

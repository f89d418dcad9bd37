"""Beside a draft model, sampled texts keep the target's law: by default, which looks up, too.

Both models write the same few tokens, and the prompt is a text of the target's: there is always
something to look up, which is often right and often wrong. Texts have no seed, so the draft samples
on its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import edge_spec
from edge_spec.core import sampling
from edge_spec.core.metrics import RoundStats
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine import speculation
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.policy import RoundPlan
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures import text_distribution as text

RUNTIMES = ("reference", "ort", "llamacpp")
FEW = 8  # tokens that are written
BEGINNING = [1, 2, 3, 4]
PARAMS = SamplingParams(temperature=1.5, top_k=4)
NUM_TEXTS, NUM_TOKENS = 1500, 6  # of which the first text.LENGTH are counted


def _write(tiny: ModuleType, path: Path, noise: float) -> str:
    """A model of those tokens: the first number of every state is large, their rows of the head add
    it, and the others do nothing but subtract it. noise: on the draft's head, which is another so.
    """
    model = tiny.build()
    embedding, head = model.weights["model.embed_tokens.weight"], model.weights["lm_head.weight"]
    head += noise * np.random.RandomState(4).standard_normal(head.shape).astype(np.float32)
    embedding[:, 0], head[:FEW, 0], head[FEW:] = 8, 4, 0
    head[FEW:, 0] = -4
    write = tiny.write_gguf if path.suffix == ".gguf" else tiny.write_hf
    return str(write(model, path))


class AnyOrder(AdaptivePolicy):
    """Judges as by default, in passes and drafts that cost the same every time. Asks the drafters
    in either order, or the first alone, as where the draft rests: all of it occurs in short texts.
    """

    def __init__(self) -> None:
        costs = RowCosts({1: 1.0, 8: 1.02})
        super().__init__(costs, dict.fromkeys(("cascade", "draft-model"), 0.02), {"suffix"})
        self._clock = lambda: 0.0
        self._random = random.Random(1)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        asked = self._random.choice([drafters, drafters[::-1], drafters[:1]])
        return super().choose(asked, pending, budget)

    def observe(self, round_stats: RoundStats) -> None:
        seconds = self.costs.at(round_stats.num_rows)
        timed = round_stats._replace(forward_s=seconds, total_s=seconds, draft_s=0.0)
        super().observe(timed)


@pytest.mark.slow
@pytest.mark.parametrize("drafters", ["auto", "suffix,draft-model"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_samples_have_the_distribution_of_the_target(
    runtime: str,
    drafters: str,
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(speculation, "AdaptivePolicy", lambda *given, **named: AnyOrder())
    monkeypatch.setattr(sampling.secrets, "randbits", random.Random(0).getrandbits)
    suffix = ".gguf" if runtime == "llamacpp" else ""
    target = _write(tiny, tmp_path / f"target{suffix}", 0)
    draft = _write(tiny, tmp_path / f"draft{suffix}", 0.1)
    opened = partial(edge_spec.load, target, runtime=runtime, threads=1)
    with opened(drafter="none") as plain:
        sampled = replace(PARAMS, seed=1)
        written = plain.generate(BEGINNING, max_tokens=60, sampling=sampled)
        prompt = (*BEGINNING, *(token.id for token in written.tokens))
        session = plain.parts.model.open_session()

        @cache
        def logits(tokens: tuple[int, ...]) -> np.ndarray:
            session.rollback(0)
            session.prefill(tokens[:-1])
            return session.forward(TokenTree.chain(tokens[-1])).logits[0].copy()

        expected = text.joint(logits, prompt, PARAMS)
        session.close()
    assert {token for run in expected for token in run} <= set(range(FEW))
    counts: Counter[tuple[int, ...]] = Counter()
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    with opened(drafter=drafters, draft=draft, draft_threads=1) as engine:
        for _ in range(NUM_TEXTS):
            found = engine.generate(prompt, max_tokens=NUM_TOKENS, sampling=PARAMS)
            counts[tuple(token.id for token in found.tokens[: text.LENGTH])] += 1
            for name, each in found.stats.drafters.items():
                drafted[name] += each.draft_n
                accepted[name] += each.draft_n_accepted
    assert set(drafted) == {"suffix", "cascade" if drafters == "auto" else "draft-model"}
    for name in drafted:  # otherwise nothing was tried
        assert 200 < accepted[name] < drafted[name] - 200
    assert text.p_value(counts, expected) > text.SMALLEST_P

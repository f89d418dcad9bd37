"""Has an ordinary draft write texts, of which its target computes features.

A draft goes on with texts of the target, as it does when it drafts, and learns what the target
would have written in the places that it comes to (on-policy distillation: Agarwal et al. 2024, GKD;
of drafts: Zhou et al. 2024, DistillSpec).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.core.sampling import SamplingParams
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.prompts import Stop, answered
from edge_spec.engine.engine import Engine

NUM_TOKENS = 48  # of one text, at most


@dataclass(frozen=True, eq=False)
class OwnTexts:
    """Tasks: each of the target's texts is gone on with once, from a drawn place of its answer.
    What is written is sampled at temperature 1, from the draft's own distribution."""

    conversations: Sequence[Conversation]
    seed: int

    @property
    def identity(self) -> str:
        told = [self.seed, NUM_TOKENS, *(each.tokens.tobytes() for each in self.conversations)]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    @property
    def count(self) -> int:
        return len(self.conversations)

    def conversation(self, engine: Engine, task: int, stop: Stop) -> Conversation | None:
        known = self.conversations[task]
        random = np.random.default_rng([self.seed, task])
        place = int(random.integers(known.start, len(known.tokens)))
        sampling = SamplingParams(temperature=1.0, seed=int(random.integers(1 << 62)))
        prompt = known.tokens[:place].tolist()
        return answered(engine, prompt, NUM_TOKENS, sampling, False, stop)

"""Forecast a drafter's speedup from acceptance in the target's texts and the time of a draft token.

Accepted draft tokens are the target's own text, so drafts from every position of a text, after the
target's tokens, show what would be accepted. Drafting right after a rejected token is harder than
on average, so steps are counted as in decoding, each from where the last one ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from edge_spec.core.heads import EagleHead, MedusaHead
from edge_spec.core.model import Forward
from edge_spec.core.model_info import TensorRows
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.independent import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.loader.head import StoredTables, head_backend
from edge_spec.models import runtimes
from edge_spec.scheduler.cost import RowCosts

_REPETITIONS = 9
# Larger than a processor's caches, which the target's pass fills before a step.
_FLUSHED_VALUES = 1 << 24
_CHAIN = 3  # draft tokens in a row; only the first starts with cold caches
_CONTEXT = 64  # tokens before a step


class Acceptance(NamedTuple):
    """of_position: acceptance of each position, if all before were accepted. tokens_a_step: with 1,
    2, ... draft tokens, including the target's own token."""

    of_position: tuple[float, ...]
    tokens_a_step: tuple[float, ...]


def measure_acceptance(drafts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Acceptance:
    """drafts: for each text, the draft tokens from each position and what the target wrote, both
    [positions, draft tokens] int; -1 after the end."""
    right = np.concatenate([drafted == written for drafted, written in drafts])
    there = np.concatenate([written >= 0 for _, written in drafts])
    reached = np.ones(len(right), bool)
    found = []
    for position in range(right.shape[1]):
        tried = reached & there[:, position]
        reached = tried & right[:, position]
        found.append(float(reached.sum() / tried.sum()) if tried.any() else 0.0)
    counts = range(1, right.shape[1] + 1)
    return Acceptance(tuple(found), tuple(_tokens_a_step(drafts, count) for count in counts))


def _tokens_a_step(drafts: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> float:
    tokens = steps = 0
    for drafted, written in drafts:
        right = (drafted == written) & (written >= 0)
        accepted = np.cumprod(right[:, :count], axis=1).sum(axis=1).tolist()
        end = int((written[:, 0] >= 0).sum())
        at = 0
        while at < end:
            at += accepted[at] + 1
            steps += 1
        tokens += end
    return tokens / steps if steps else 1.0


class Forecast(NamedTuple):
    """The best chain length, and its speedup over plain decoding."""

    num_draft_tokens: int
    speedup: float


def best_chain(acceptance: Acceptance, costs: RowCosts, draft_token_s: float) -> Forecast:
    """Return the chain length with the largest speedup for the measured pass times."""
    widest = len(acceptance.tokens_a_step) + 1
    # Plain steps may use wider passes, too, so one row measured slower than two is no gain.
    plain_s = min(costs.at(rows) for rows in range(1, widest + 1))
    found = [
        Forecast(count, tokens * plain_s / (costs.at(count + 1) + count * draft_token_s))
        for count, tokens in enumerate(acceptance.tokens_a_step, start=1)
    ]
    return max(found, key=lambda each: each.speedup)


def time_head(path: Path, source: TensorRows) -> float:
    """Return the seconds per draft token. source: the target's weights."""
    target = source.config
    head = runtimes.open_head(path, target)
    backend = head_backend(path, "", target.hidden_size, keeps=False)
    if isinstance(head, EagleHead):
        network = LayersNetwork(head, StoredTables(source), backend)
        eagle = EagleDrafter(network)
        count = min(_CONTEXT, target.context_length - 1)
        eagle.begin([0] * (count + 1))
        eagle.take_features(0, np.ones((count, network.features_size), np.float32))
        chain = Budget(_CHAIN, _CHAIN + 1, branches=False)
        return _median_s(lambda: eagle.propose(0, chain)) / _CHAIN
    assert isinstance(head, MedusaHead)  # no others are trained here
    drafter = MedusaDrafter(MedusaNetwork(head, backend))
    drafter.begin([0])
    states = np.ones((1, target.hidden_size), np.float32)
    out = Forward(np.zeros((1, target.vocab_size), np.float32), states)

    def step() -> object:
        drafter.observe(TokenTree.chain(0), out, Verdict((0,), (), False))
        return drafter.propose(0, Budget(1, 2, branches=False))

    return _median_s(step)


def _median_s(step: Callable[[], object], count: int = 1) -> float:
    """Return the median seconds per step with cold caches, as after a pass of the target. count:
    steps per measurement."""
    other = np.zeros(_FLUSHED_VALUES, np.float32)
    times = []
    for _ in range(_REPETITIONS):
        other += 1
        began_s = time.perf_counter()
        for _ in range(count):
            step()
        times.append((time.perf_counter() - began_s) / count)
    return median(times)

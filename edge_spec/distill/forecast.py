"""Measures how many of a drafter's tokens would be accepted in what the target wrote by itself, and
what a draft token takes: together they foretell what the drafter gains.

Whatever a drafter has proposed before a position is the target's own text if it was accepted. So
drafts from every place of a text, each after the target's own tokens, show what would be accepted:
position i counts only where all before it were right.

Rounds do not begin at every place. One that begins just after a token that was not foreseen begins
at a harder place than most, so a round commits fewer tokens than those shares say: rounds are
counted as they would be decoded, each from where the one before it ended.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, MedusaHead
from edge_spec.core.model import Forward, Model, Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.distill.answers import KEPT_DAYS
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel, FeatureStore
from edge_spec.drafters.heads.independent import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.layers import EagleNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.loader import load_asked
from edge_spec.loader.head import StoredTables, head_backend
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.scheduler.cost import RowCosts
from edge_spec.storage.atomic import cache_directory


@dataclass(frozen=True)
class Acceptance:
    """of_position: by position, given that all before it were accepted; from every place.
    tokens_a_round: with 1, 2, ... draft tokens a round, the target's own token included."""

    of_position: tuple[float, ...]
    tokens_a_round: tuple[float, ...]


def measured_acceptance(drafts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Acceptance:
    """drafts: of each text, what was drafted from each place and what the target wrote there, both
    [places, positions] int; -1 for what the target did not write any more: the text had ended."""
    right = np.concatenate([drafted == written for drafted, written in drafts])
    there = np.concatenate([written >= 0 for _, written in drafts])
    reached = np.ones(len(right), bool)
    found = []
    for position in range(right.shape[1]):
        tried = reached & there[:, position]
        reached = tried & right[:, position]
        found.append(float(reached.sum() / tried.sum()) if tried.any() else 0.0)
    counts = range(1, right.shape[1] + 1)
    of_rounds = tuple(_tokens_a_round(drafts, count) for count in counts)
    return Acceptance(tuple(found), of_rounds)


def _tokens_a_round(drafts: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> float:
    tokens = rounds = 0
    for drafted, written in drafts:
        right = (drafted == written) & (written >= 0)
        accepted = np.cumprod(right[:, :count], axis=1).sum(axis=1).tolist()
        places = int((written[:, 0] >= 0).sum())
        at = 0
        while at < places:
            at += accepted[at] + 1
            rounds += 1
        tokens += places
    return tokens / rounds if rounds else 1.0


class Forecast(NamedTuple):
    """The best chain: how many draft tokens, and its speedup over plain decoding."""

    num_draft_tokens: int
    speedup: float


def best_chain(
    acceptance: Acceptance, costs: RowCosts, draft_s: Callable[[int], float]
) -> Forecast:
    """Returns the best number of draft tokens by the measured times of passes here. draft_s:
    seconds of a chain by its number of tokens."""
    widest = len(acceptance.tokens_a_round) + 1
    # A plain step may be widened as well: that one row was measured slower than two is no gain.
    plain_s = min(costs.at(rows) for rows in range(1, widest + 1))
    found = [
        Forecast(count, tokens * plain_s / (costs.at(count + 1) + draft_s(count)))
        for count, tokens in enumerate(acceptance.tokens_a_round, start=1)
    ]
    return max(found, key=lambda each: each.speedup)


_REPETITIONS = 9
# More than a processor's caches hold: what a step finds there after the target's pass.
_FLUSHED_VALUES = 1 << 24
_CHAIN = 3  # draft tokens after each other, of which the first finds nothing in the caches
CONTEXT = 64  # tokens before a step


def draft_token_s(path: Path, target: ModelConfig, source: TensorRows) -> float:
    """Seconds of one, median of several, by the drafter that will read the head. path: of it."""
    head = runtimes.open_head(path, target)
    backend = head_backend(path, "", target.hidden_size, keeps=False)
    if isinstance(head, MedusaHead):
        return median_s(_medusa_step(MedusaNetwork(head, backend), target))
    assert isinstance(head, EagleHead)  # no others are trained here
    step = _eagle_step(EagleNetwork(head, StoredTables(source), backend), target)
    return median_s(step, _CHAIN)


def _medusa_step(network: MedusaNetwork, target: ModelConfig) -> Callable[[], object]:
    drafter = MedusaDrafter(network)
    drafter.begin([0])
    states = np.ones((1, target.hidden_size), np.float32)
    out = Forward(np.zeros((1, target.vocab_size), np.float32), states)

    def step() -> object:
        drafter.observe(TokenTree.chain(0), out, Verdict((0,), (), False))
        return drafter.propose(0, Budget(1, 2, branches=False))

    return step


def _eagle_step(network: EagleNetwork, target: ModelConfig) -> Callable[[], object]:
    store = FeatureStore(network.features_size, WINDOW)
    count = min(CONTEXT, target.context_length - 1)
    store.put(0, np.ones((count, network.features_size), np.float32))
    return _step(EagleModel(network, store), count)


def median_s(step: Callable[[], object], count: int = 1) -> float:
    """Returns the seconds of one of several steps in a row, median of several rows, each after
    other work has taken the processor's caches as a pass of the target does."""
    other = np.zeros(_FLUSHED_VALUES, np.float32)
    times = []
    for _ in range(_REPETITIONS):
        other += 1
        began_s = time.perf_counter()
        for _ in range(count):
            step()
        times.append((time.perf_counter() - began_s) / count)
    return median(times)


UNTRAINED = "untrained"  # what the names of models that are timed begin with


def ordinary_draft_token_s(path: Path, asked: AskedOptions, progress: Progress) -> float:
    """Seconds of a step of an ordinary draft, median of several, opened as it will draft. asked:
    how its target is opened."""
    alone = replace(
        asked,
        runtime=asked.draft_runtime,
        device=asked.draft_device,
        threads=asked.draft_threads or asked.threads,
        draft_runtime="auto",
        draft_device=None,
        draft_threads=None,
        plan=None,
        drafter="none",
    )
    with converted_aside(path), load_asked(str(path), alone, progress) as engine:
        model = engine.parts.model
        return median_s(_step(model, min(CONTEXT, model.config.context_length - 1)))


@contextmanager
def converted_aside(path: Path) -> Iterator[None]:
    """Removes with the block what is converted of the model at `path`, whose name nobody else has,
    and so does what a kill has left of others KEPT_DAYS ago."""
    bundles = cache_directory() / "bundles"
    try:
        yield
    finally:
        _remove(bundles.glob(f"{path.name}-*"))
        before = time.time() - KEPT_DAYS * 86400
        _remove(each for each in bundles.glob(f"{UNTRAINED}-*") if each.stat().st_mtime < before)


def _remove(paths: Iterable[Path]) -> None:
    with suppress(OSError):  # another process may be removing them
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _step(model: Model, num_before: int) -> Callable[[], object]:
    session = model.open_session()
    session.prefill([0] * num_before)
    return lambda: session.forward(TokenTree.chain(0))

"""Times a draft token of a trained head here, whatever it has learnt."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, MedusaHead
from edge_spec.core.model import Forward
from edge_spec.core.model_info import TensorRows
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.medusa import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.loader.head import StoredTables
from edge_spec.loader.head_backend import head_backend
from edge_spec.models import runtimes

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
    session = EagleModel(network, store).open_session()
    count = min(CONTEXT, target.context_length - 1)
    store.put(0, np.ones((count, network.features_size), np.float32))
    session.prefill([0] * count)
    return lambda: session.forward(TokenTree.chain(0))


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

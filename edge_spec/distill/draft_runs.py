"""Times the draft tokens of a drafter that is to be trained."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, MedusaHead
from edge_spec.core.model import Forward, Model, Progress
from edge_spec.core.model_info import TensorRows
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.distill.work_folder import KEPT_DAYS
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.medusa import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.loader import load_asked
from edge_spec.loader.head import StoredTables, head_backend
from edge_spec.models import runtimes
from edge_spec.models.asked_options import AskedOptions
from edge_spec.storage.atomic import cache_directory

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
        return median_s(_step(engine.parts.model))


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


def _step(model: Model) -> Callable[[], object]:
    session = model.open_session()
    session.prefill([0] * min(CONTEXT, model.config.context_length - 1))
    return lambda: session.forward(TokenTree.chain(0))

"""What a trained head costs beside its target, and how often it has to be right: random heads.

    python benchmarks/head_cost.py smollm2                # shapes A and B, beside the target
    python benchmarks/head_cost.py llama-8b --scored 32000  # A for Llama 3.1 8B, by itself

A is an EAGLE-3 layer of the target's shape, B three Medusa heads of one block that share an output
matrix; both score `--scored` tokens. c is what a draft token of A costs (the mean of a chain of
three), or a round of B, in plain steps; r what a pass of k rows costs. A chain of k - 1 draft
tokens, each right with the chance a once those before it are, pays where 1 + a + ... + a^(k-1) is
at least r + (k - 1) c (A) or r + c (B). Passes of target and head are timed in turns, as a
conversation makes them.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import open_engine, report
from random_heads import LLAMA_8B, write_eagle3, write_medusa

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import GivesFeatures
from edge_spec.core.heads import EagleHead, HeadBackend, MedusaHead
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.float_products import NumpyBackend
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.loader.head import StoredTables
from edge_spec.loader.head_backend import head_backend
from edge_spec.models import runtimes
from edge_spec.models.source import Source

ROWS = (2, 3, 4, 8)
# What was assumed before anything was measured, for the demo model on this kind of processor.
FORECAST_ROWS = dict(zip(ROWS, (1.15, 1.35, 1.55, 2.4), strict=True))
FORECAST_COST = {"A": 0.07, "B": 0.03}


class NoTables:
    """Of a target that is not there."""

    def __init__(self, hidden_size: int) -> None:
        self._row = np.full(hidden_size, 0.1, np.float32)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return np.tile(self._row, (len(tokens), 1))

    def output_rows(self, tokens: np.ndarray | None) -> np.ndarray:
        raise NotImplementedError


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def break_even(rows: int, pass_cost: float, draft_cost: float) -> float:
    """The chance from which on a chain of rows - 1 draft tokens pays."""
    chances = np.linspace(0, 1, 1001)
    tokens = sum(chances**depth for depth in range(rows))
    pays = tokens >= pass_cost + draft_cost
    return float(chances[pays][0]) if pays.any() else float("nan")


def cost_of_round(shape: str, rows: int, cost: float) -> float:
    return cost * (rows - 1 if shape == "A" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a MODEL, or llama-8b")
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--scored", type=int, default=8192, help="tokens that the heads score")
    parser.add_argument("--context", type=int, default=256, help="tokens before the steps")
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--threads", type=int, help="of a wide head")
    parser.add_argument("--float", action="store_true", help="the head in float32 by numpy")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model == "llama-8b":
            found = measure_alone(LLAMA_8B, Path(folder), arguments)
        else:
            found = measure_beside(Path(folder), arguments)
    report({"head_cost": found}, arguments.out)


def measure_alone(config: ModelConfig, folder: Path, arguments: Any) -> dict[str, Any]:
    path = write_eagle3(folder / "head", config, arguments.scored)
    began, held = time.perf_counter(), _held_mb()
    backend = _backend(path, "", config, arguments)
    head = runtimes.open_head(path, config)
    assert isinstance(head, EagleHead)
    EagleNetwork(head, NoTables(config.hidden_size), backend)
    converted_s = time.perf_counter() - began
    held, began = _held_mb(), time.perf_counter()
    network = EagleNetwork(head, NoTables(config.hidden_size), backend)
    opened_s = time.perf_counter() - began
    store, session = _drafting(network, arguments.context)
    memory_mb = _held_mb() - held
    one = TokenTree.chain(7)
    step_ms = median(timed(lambda: session.forward(one)) for _ in range(arguments.repetitions))
    four = TokenTree.chain(7, [8, 9, 10])
    catch_up_ms = median(timed(lambda: _all_known(store, session, four)) for _ in range(10))
    print(f"converted in {converted_s:.1f} s, opened again in {opened_s:.1f} s")
    print(f"a step {step_ms:.2f} ms, a pass of 4 rows {catch_up_ms:.2f} ms, {memory_mb:.0f} MB")
    return {"step_ms": step_ms, "rows_4_ms": catch_up_ms, "memory_mb": memory_mb}


def measure_beside(folder: Path, arguments: Any) -> dict[str, Any]:
    source = Source(arguments.model, lambda what, fraction: None)
    stored = runtimes.open_checkpoint(source.path)
    paths = {
        "A": write_eagle3(folder / "eagle", stored.config, arguments.scored),
        "B": write_medusa(folder / "medusa", stored.config, arguments.scored),
    }
    options = {"runtime": arguments.runtime, "drafter": "eagle", "head": paths["A"]}
    with open_engine(arguments.model, **options) as engine:
        config, target = engine.parts.model.config, source.identity
        eagle, medusa = (runtimes.open_head(path, config) for path in paths.values())
        assert isinstance(eagle, EagleHead) and isinstance(medusa, MedusaHead)
        backends = [_backend(path, target, config, arguments) for path in paths.values()]
        network = EagleNetwork(eagle, StoredTables(stored), backends[0])
        times = _times(engine.parts.model, network, MedusaNetwork(medusa, backends[1]), arguments)
    for name, value in times.items():
        print(f"{name}: {value:.2f} ms")
    return {"ms": times, "break_even": _told(times)}


def _times(
    model: Any, network: EagleNetwork, medusa: MedusaNetwork, arguments: Any
) -> dict[str, float]:
    """Medians, in milliseconds."""
    plain, telling = model.open_session(), model.open_session()
    assert isinstance(telling, GivesFeatures)
    _store, drafting = _drafting(network, arguments.context)
    telling.collect_features(network.feature_layers, lambda at, rows: None)
    for session in (plain, telling):
        session.prefill(_text(arguments.context))
    one, state = TokenTree.chain(7), np.full(model.config.hidden_size, 0.1, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain.forward(one),
        "with features": lambda: telling.forward(one),
        "A, three draft tokens": lambda: _chain(drafting, 3, network.likeliest),
        "plain again": lambda: plain.forward(one),
        "B, a round": lambda: medusa.likeliest(state),
    }
    for rows in ROWS:
        tree = TokenTree.chain(7, list(range(8, 7 + rows)))
        calls[f"{rows} rows"] = lambda tree=tree: plain.forward(tree)
        calls[f"{rows} rows with features"] = lambda tree=tree: telling.forward(tree)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.repetitions):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: median(values) for name, values in times.items()}


def _told(times: dict[str, float]) -> dict[str, Any]:
    found = {}
    print("shape  k    c  (forecast)    r  (forecast)  pays from  (forecast)")
    for shape, name in (("A", "A, three draft tokens"), ("B", "B, a round")):
        cost = times[name] / times["plain"] / (3 if shape == "A" else 1)
        for rows in ROWS:
            ending = " with features" if shape == "A" else ""
            measured = times[f"{rows} rows{ending}"] / times["plain"]
            forecast, assumed = FORECAST_ROWS[rows], FORECAST_COST[shape]
            needed = break_even(rows, measured, cost_of_round(shape, rows, cost))
            expected = break_even(rows, forecast, cost_of_round(shape, rows, assumed))
            print(
                f"{shape}      {rows} {cost:.3f}  ({assumed:.2f})      {measured:.2f}  "
                f"({forecast:.2f})      {needed:.2f}       ({expected:.2f})"
            )
            found[f"{shape}, {rows} rows"] = {"c": cost, "r": measured, "pays_from": needed}
    return found


def _backend(path: Path, target: str, config: ModelConfig, arguments: Any) -> HeadBackend:
    if arguments.float:
        return NumpyBackend()
    return head_backend(path, target, config.hidden_size, arguments.threads)


def _drafting(network: EagleNetwork, context: int) -> tuple[FeatureStore, Any]:
    """A session of the head that has read a text."""
    store = FeatureStore(network.features_size, WINDOW)
    random = np.random.default_rng(1)
    store.put(0, random.standard_normal((context, network.features_size), np.float32))
    session = EagleModel(network, store).open_session()
    session.prefill(_text(context))
    return store, session


def _chain(session: Any, count: int, choose: Callable[[np.ndarray], Any]) -> None:
    """Drafts so many tokens, and takes them back: the first after a pass of the target, which
    leaves nothing of the head in the processor's caches."""
    length = session.length
    for token in range(7, 7 + count):
        choose(session.forward(TokenTree.chain(token)).logits[0])
        session.commit([0])
    session.rollback(length)


def _all_known(store: FeatureStore, session: Any, tree: TokenTree) -> None:
    """Scores rows whose features are all there, as after a round of accepted tokens."""
    size = store.get(np.array([0])).shape[1]
    store.put(session.length, np.zeros((len(tree), size), np.float32))
    session.forward(tree)


def _text(context: int) -> Iterable[int]:
    return np.random.default_rng(1).integers(100, 5000, context).tolist()


def _held_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()

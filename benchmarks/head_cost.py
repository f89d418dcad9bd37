"""What a trained head costs beside its target: a random EAGLE-3 head of a given shape, no text.

    python benchmarks/head_cost.py smollm2 --scored 8192

Times of a step of the head, of a step of the target, plain and while it returns features, in turns,
and what a chain of k draft tokens has to be right for at least (Li et al. 2024; break-even of a
chain whose tokens are right with one chance each). A random head's tokens are never right: its
speed is a trained one's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import report

import edge_spec
from edge_spec.core.config import ModelConfig
from edge_spec.core.features import GivesFeatures
from edge_spec.core.heads import EagleHead
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.loader.head import StoredTables
from edge_spec.models import runtimes
from edge_spec.models.source import Source


def random_head(target: ModelConfig, scored: int) -> EagleHead:
    """One layer of the target's shape, which scores `scored` tokens."""
    random, hidden = np.random.default_rng(0), target.hidden_size
    config = ModelConfig(
        architecture="eagle",
        num_layers=1,
        hidden_size=hidden,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_epsilon=target.norm_epsilon,
        rope_theta=target.rope_theta,
    )
    matrices = {
        "fc": (hidden, 3 * hidden),
        "layers.0.q": (config.query_size, 2 * hidden),
        "layers.0.k": (config.kv_size, 2 * hidden),
        "layers.0.v": (config.kv_size, 2 * hidden),
        "layers.0.o": (hidden, config.query_size),
        "layers.0.gate": (config.intermediate_size, hidden),
        "layers.0.up": (config.intermediate_size, hidden),
        "layers.0.down": (hidden, config.intermediate_size),
    }
    tensors = {
        f"{name}.weight": random.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, shape in matrices.items()
    }
    tensors["head"] = random.standard_normal((scored, hidden), np.float32)
    norms = ("norm", "layers.0.hidden_norm", "layers.0.input_norm", "layers.0.post_norm")
    tensors |= {name: np.ones(hidden, np.float32) for name in norms}
    layers = (2, target.num_layers // 2, target.num_layers - 3)
    ids = np.arange(scored, dtype=np.int64)
    return EagleHead("EAGLE-3", Path(), config, layers, hidden, tensors, token_ids=ids)


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def break_even(target_ms: float, rows_ms: float, draft_ms: float, count: int) -> float:
    """The chance of each of `count` draft tokens from which on a round pays."""
    chances = np.linspace(0, 1, 1001)
    tokens = sum(chances**depth for depth in range(count + 1))
    pays = tokens * target_ms >= rows_ms + count * draft_ms
    return float(chances[pays][0]) if pays.any() else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--scored", type=int, default=8192, help="tokens that the head scores")
    parser.add_argument("--context", type=int, default=256, help="tokens before the steps")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    with edge_spec.load(arguments.model, runtime=arguments.runtime, drafter="none") as engine:
        found = measure(engine, arguments)
    report(found, arguments.out)


def measure(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    model = engine.parts.model
    source = Source(arguments.model, lambda what, fraction: None)
    head = random_head(model.config, arguments.scored)
    network = EagleNetwork(head, StoredTables(runtimes.open_checkpoint(source.path)))
    store = FeatureStore(network.features_size, WINDOW)
    drafting = EagleModel(network, store).open_session()
    text = np.random.default_rng(1).integers(100, 5000, arguments.context).tolist()
    plain, telling = model.open_session(), model.open_session()
    assert isinstance(telling, GivesFeatures)
    telling.collect_features(
        head.feature_layers, lambda at, rows: store.put(at, rows.reshape(len(rows), -1))
    )
    for session in (plain, telling, drafting):
        session.prefill(text)
    one = TokenTree.chain(7)
    times: dict[str, list[float]] = {}
    for _ in range(arguments.repetitions):
        times.setdefault("plain", []).append(timed(lambda: plain.forward(one)))
        times.setdefault("with features", []).append(timed(lambda: telling.forward(one)))
        times.setdefault("head", []).append(timed(lambda: drafting.forward(one)))
        for rows in (2, 3, 4, 8):
            tree = TokenTree.chain(7, list(range(8, 7 + rows)))
            times.setdefault(f"{rows} rows", []).append(timed(lambda t=tree: telling.forward(t)))
    medians = {name: median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name}: {value:.2f} ms")
    needed = {
        count: break_even(medians["plain"], medians[f"{count + 1} rows"], medians["head"], count)
        for count in (1, 2, 3, 7)
    }
    for count, chance in needed.items():
        print(f"{count} draft tokens pay where each is right at {100 * chance:.0f} %")
    return {"head_cost": {"ms": medians, "break_even": needed}}


if __name__ == "__main__":
    main()

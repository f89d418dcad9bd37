"""Trained heads: what they cost beside a target, and questions about one domain to train them on.

    python benchmarks/heads.py cost smollm2
    python benchmarks/heads.py questions DIR

`cost` times heads with random weights. A is an EAGLE-3 layer of the target's shape, B three Medusa
heads of one block that share an output matrix; both score `--scored` tokens. C are three Medusa
heads with an output matrix each, D a DFlash head of five layers that drafts blocks of 16 tokens;
both score all tokens. Three draft tokens are asked of each, their choice included. c is what a
draft token of A costs (the mean of the chain), or a round of B, in plain steps; r what a pass of k
rows costs. A chain of k - 1 draft tokens, each right with the chance a once those before it are,
pays where 1 + a + ... + a^(k-1) is at least r + (k - 1) c (A) or r + c (B). Passes of target and
head are timed in turns, as a conversation makes them.

`questions` makes 48 manuals of half a page and five questions about each: 198 to learn from, and 24
that are asked afterwards, 12 of them about manuals that no question to learn from is about. Then
`edge-spec distill --prompts DIR/learn.jsonl` trains a head, and `edge-spec bench --draft HEAD
--prompts DIR/ask.jsonl` says how fast the others are answered with it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import open_engine, report
from random_heads import write_dflash, write_eagle3, write_medusa

from edge_spec.core.config import ModelConfig
from edge_spec.core.features import GivesFeatures
from edge_spec.core.heads import DFlashHead, EagleHead, HeadBackend, MedusaHead
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.dflash import DFlashDrafter, DFlashNetwork
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.medusa import MedusaDrafter, MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.loader.head import StoredTables, head_backend
from edge_spec.models import runtimes
from edge_spec.models.source import Source

ROWS = (2, 3, 4, 8)
FEATURES = 5  # of a token, that D reads
CHAIN = Budget(num_draft_tokens=3, num_rows=4, branches=False)
_MAKERS = ("Halden", "Orrin", "Velt", "Sorrel", "Kestrel", "Marlow", "Pell", "Tavin")
_THINGS = ("pump", "heater", "lamp", "kettle", "drill", "fan", "scale", "router", "filter", "saw")
_PARTS = ("housing", "valve", "gasket", "switch", "cable", "bearing", "sensor", "display")
_COLOURS = ("red", "amber", "green", "blue", "white")
ASKED = (
    "Summarize the manual of the {name} in a few sentences.",
    "How is the {name} installed? List the steps.",
    "What does it mean when the light of the {name} is {colour}, and what has to be done?",
    "How is the {part} of the {name} cleaned and how often?",
    "Write a short note to a customer who asks about the warranty of the {name}.",
)
_MANUALS, _NEW = 48, 6  # of them, about which nothing is learnt
_SEED = 7
_HELD_OUT = 12  # questions about manuals that others are learnt of, and as many about new ones


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


def measure_beside(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    source = Source(arguments.model, lambda what, fraction: None)
    stored = runtimes.open_checkpoint(source.path)
    config = stored.config
    writers: dict[str, Callable[[], Path]] = {
        "A": lambda: write_eagle3(folder / "eagle", config, arguments.scored),
        "B": lambda: write_medusa(folder / "medusa", config, arguments.scored),
        "C": lambda: write_medusa(folder / "own", config, None),
        "D": lambda: write_dflash(folder / "dflash", config),
    }
    paths = {shape: write() for shape, write in writers.items() if shape in arguments.shapes}
    options = {"runtime": arguments.runtime, "drafter": "eagle", "head": paths["A"]}
    with open_engine(arguments.model, **options) as engine:
        config, target = engine.parts.model.config, source.identity
        heads = {shape: runtimes.open_head(path, config) for shape, path in paths.items()}
        backends = {
            shape: _backend(path, target, config, arguments) for shape, path in paths.items()
        }
        tables = StoredTables(stored)
        drafters: dict[str, Drafter] = {}
        for shape, head in heads.items():
            if isinstance(head, MedusaHead):
                drafters[shape] = MedusaDrafter(MedusaNetwork(head, backends[shape]))
            elif isinstance(head, DFlashHead):
                drafters[shape] = DFlashDrafter(DFlashNetwork(head, tables, backends[shape]))
        eagle = heads["A"]
        assert isinstance(eagle, EagleHead)
        network = EagleNetwork(eagle, tables, backends["A"])
        times = _times(engine.parts.model, network, drafters, arguments)
    for name, value in times.items():
        print(f"{name}: {value:.2f} ms")
    return {"ms": times, "break_even": _break_evens(times)}


def _times(
    model: Any, network: EagleNetwork, drafters: dict[str, Drafter], arguments: Any
) -> dict[str, float]:
    """Medians, in milliseconds."""
    plain, telling = model.open_session(), model.open_session()
    assert isinstance(telling, GivesFeatures)
    _store, drafting = _drafting(network, arguments.context)
    telling.collect_features(network.feature_layers, lambda at, rows: None)
    for session in (plain, telling):
        session.prefill(_text(arguments.context))
    one = TokenTree.chain(7)
    rounds = {name: _rounds(each, model.config, CHAIN) for name, each in drafters.items()}
    for each in drafters.values():
        _begin(each, model.config, arguments.context)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain.forward(one),
        "with features": lambda: telling.forward(one),
        "A, three draft tokens": lambda: _chain(drafting, 3, network.likeliest),
    }
    calls |= {f"{name}, a round": rounds for name, rounds in rounds.items()}
    for rows in ROWS:
        tree = TokenTree.chain(7, list(range(8, 7 + rows)))
        calls[f"{rows} rows"] = lambda tree=tree: plain.forward(tree)
        calls[f"{rows} rows with features"] = lambda tree=tree: telling.forward(tree)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.repetitions):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: median(values) for name, values in times.items()}


class _GivesFeatures:
    """A target's session that gives features of a text, once."""

    def __init__(self, found: np.ndarray) -> None:
        self._found = found
        self.collects = True

    def collect_features(self, layers: Any, take: Callable[[int, np.ndarray], None]) -> None:
        take(0, self._found)


def _begin(drafter: Drafter, config: ModelConfig, context: int) -> None:
    """Gives the drafter a text."""
    text = list(_text(context))
    if drafter.traits.target_session:
        random = np.random.default_rng(1)
        found = random.standard_normal((context - 1, FEATURES, config.hidden_size), np.float32)
        drafter.attach(None, _GivesFeatures(found))  # type: ignore[arg-type]
    drafter.begin(text)


def _rounds(drafter: Drafter, config: ModelConfig, budget: Budget) -> Callable[[], TokenTree]:
    """Drafts after a round in which one token was accepted, whatever it was."""
    width = config.hidden_size
    hidden, features = np.full((2, width), 0.1, np.float32), np.ones((2, FEATURES, width))
    out = Forward(np.zeros((2, 1), np.float32), hidden, features.astype(np.float32))
    verdict, tree = Verdict((8, 9), (1,), exhausted=False), TokenTree.chain(7, [8])

    def round_() -> TokenTree:
        drafter.observe(tree, out, verdict)
        return drafter.propose(9, budget)

    return round_


def _break_evens(times: dict[str, float]) -> dict[str, Any]:
    """Prints, and returns, from which chance on a chain of each length pays."""
    found = {}
    print("shape  k      c     r  pays from")
    named = {"A": "A, three draft tokens", "B": "B, a round"}
    for shape, name in ((shape, name) for shape, name in named.items() if name in times):
        cost = times[name] / times["plain"] / (3 if shape == "A" else 1)
        for rows in ROWS:
            ending = " with features" if shape == "A" else ""
            measured = times[f"{rows} rows{ending}"] / times["plain"]
            needed = break_even(rows, measured, cost_of_round(shape, rows, cost))
            print(f"{shape}      {rows}  {cost:.3f}  {measured:.2f}       {needed:.2f}")
            found[f"{shape}, {rows} rows"] = {"c": cost, "r": measured, "pays_from": needed}
    return found


def _backend(path: Path, target: str, config: ModelConfig, arguments: Any) -> HeadBackend | None:
    if arguments.float:
        return None
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
    """Drafts `count` tokens, and takes them back: the first after a pass of the target, which
    leaves nothing of the head in the processor's caches."""
    length = session.length
    for token in range(7, 7 + count):
        choose(session.forward(TokenTree.chain(token)).logits[0])
        session.commit([0])
    session.rollback(length)


def _text(context: int) -> Iterable[int]:
    return np.random.default_rng(1).integers(100, 5000, context).tolist()


@dataclass(frozen=True)
class Manual:
    """A document: a product's manual."""

    name: str
    part: str
    colour: str
    text: str


def manuals(count: int, seed: int) -> list[Manual]:
    random = np.random.default_rng(seed)
    found = []
    for index in range(count):
        maker, thing = random.choice(_MAKERS), _THINGS[index % len(_THINGS)]
        name = f"{maker} {thing} {random.integers(2, 90) * 10}"
        part, other = random.choice(_PARTS, 2, replace=False)
        colour, second = random.choice(_COLOURS, 2, replace=False)
        text = (
            f"Manual of the {name}. The {name} is made for indoor use and runs on "
            f"{random.integers(110, 240)} volts. To install it, place it on a level surface, "
            f"connect the {other} to the {part}, tighten the {random.integers(2, 8)} screws, and "
            f"press the main button for {random.integers(2, 9)} seconds. When the light is "
            f"{colour}, the {part} is blocked and has to be cleaned. When the light is {second}, "
            f"the {name} is ready for use. Clean the {part} every {random.integers(2, 12)} weeks "
            f"with warm water and a soft cloth, and never use solvents. Replace the {other} after "
            f"{random.integers(1, 9) * 500} hours. The warranty of the {name} covers "
            f"{random.integers(1, 6)} years, but not damage to the {other} that comes from wrong "
            f"installation. For service, call the {maker} service desk and have the serial number "
            f"of the {name} at hand."
        )
        found.append(Manual(name, str(part), str(colour), text))
    return found


def write_questions(folder: Path) -> None:
    known, random = manuals(_MANUALS, _SEED), np.random.default_rng(5)
    pairs = [(which, asked) for which in range(_MANUALS - _NEW) for asked in range(len(ASKED))]
    random.shuffle(pairs)
    new = [
        (which, int(asked))
        for which in range(_MANUALS - _NEW, _MANUALS)
        for asked in random.choice(len(ASKED), _HELD_OUT // _NEW, replace=False)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    asked = [("known", pair) for pair in pairs[:_HELD_OUT]] + [("new", pair) for pair in new]
    for name, entries in (
        ("learn", [("manuals", pair) for pair in pairs[_HELD_OUT:]]),
        ("ask", asked),
    ):
        lines = [
            {"id": f"{which}-{at}", "category": category, "prompt": _prompt(known[which], at)}
            for category, (which, at) in entries
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _prompt(manual: Manual, asked: int) -> str:
    question = ASKED[asked].format(**vars(manual))
    return f"Answer with the help of the text.\n\n{manual.text}\n\nQuestion: {question}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("questions").add_argument("folder", type=Path)
    cost = commands.add_parser("cost")
    cost.add_argument("model", help="a MODEL")
    cost.add_argument("--runtime", default="ort")
    cost.add_argument("--scored", type=int, default=8192, help="tokens that the heads score")
    cost.add_argument("--shapes", default="ABCD", help="A and those of the others to time")
    cost.add_argument("--context", type=int, default=256, help="tokens before the steps")
    cost.add_argument("--repetitions", type=int, default=60)
    cost.add_argument("--threads", type=int, help="of a wide head")
    cost.add_argument("--float", action="store_true", help="the head in float32 by numpy")
    cost.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "questions":
        write_questions(arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure_beside(Path(folder), arguments)
    report({"head_cost": found}, arguments.json)


if __name__ == "__main__":
    main()

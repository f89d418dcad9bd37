"""A day of questions about the same documents, with and without heads that learn from the answers.

    python benchmarks/learning_curve.py [MODEL] [--questions 60] [--out curve.json]
    python benchmarks/learning_curve.py [MODEL] --rates --cache DIR [--questions 84] [--last 24]
    python benchmarks/learning_curve.py [MODEL] --delay --cache DIR

Documents and questions are made here. Every question is answered three times: without a head, with
the head that the measurement has chosen, if any, and with the newest head in any case. After each
question what an idle process would do is done at once, so no time of the day matters. The folder of
what was learnt is `--cache`; with --rates nothing is learnt: the last questions are answered in
turns, and tokens a second are what is printed. Texts have to be the same in all cases.
More questions than were asked before are new ones. --delay has a process learn again, and says how
long a prompt that comes meanwhile waits for its first text, beside one that comes while none runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.metrics import Stats
from edge_spec.engine.engine import Engine
from edge_spec.engine.learning import LearntHead
from edge_spec.learning.conditions import Conditions
from edge_spec.learning.folder import LearningFolder, LearningState
from edge_spec.learning.heads import open_learnt_head
from edge_spec.learning.learner import Learner, start_learning
from edge_spec.learning.sitting import Sitting
from edge_spec.loader import load_asked
from edge_spec.models.asked_options import AskedOptions
from edge_spec.placement.machine import describe_machine
from edge_spec.storage.atomic import CACHE_VARIABLE, cache_directory

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


def questions(count: int, num_manuals: int, seed: int) -> Iterator[str]:
    """In an order as people come: any manual, any question, now and then the same one."""
    random = np.random.default_rng(seed + 1)
    known = manuals(num_manuals, seed)
    for _ in range(count):
        manual = known[random.integers(len(known))]
        asked = ASKED[random.integers(len(ASKED))].format(**vars(manual))
        yield f"Answer with the help of the text.\n\n{manual.text}\n\nQuestion: {asked}"


class Given:
    """Tells an engine who drafts, and takes nothing of it."""

    def __init__(self) -> None:
        self.given: LearntHead | None = None

    def take(self, prompt: Any, tokens: Any, states: Any) -> None: ...
    def head(self) -> LearntHead | None:
        return self.given

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Row:
    """One question."""

    number: int
    tokens: int
    tokens_a_round: dict[str, float]
    per_second: dict[str, float]
    drafts: bool
    learnt_tokens: int
    gain: float | None
    sitting_s: float = 0.0
    accepted_by_head: dict[str, float] = field(default_factory=dict)


class Day:
    """Three engines on one model: "suffix", "chosen" and "newest"."""

    def __init__(self, asked: argparse.Namespace, opened: ExitStack) -> None:
        self._asked = asked
        self._newest = Given()
        self._learner: Learner | None = None
        options = AskedOptions(threads=asked.threads)
        self.engines: dict[str, Engine] = {}
        for name, start in (
            ("suffix", None),
            ("chosen", self._start),
            ("newest", lambda *_: self._newest),
        ):
            engine = load_asked(asked.model, options, _quiet, learning=start)
            self.engines[name] = opened.enter_context(engine)

    def _start(self, *given: Any) -> Learner:
        """Never idle: what it would do is done between two questions."""
        learner = start_learning(*given)
        learner._parts = replace(learner._parts, is_idle=lambda: False)
        self._learner = learner
        return learner

    @property
    def folder(self) -> LearningFolder:
        assert self._learner is not None
        return self._learner._folder

    def answer(self, question: str) -> dict[str, Stats]:
        """Statistics by engine. Raises AssertionError for texts that differ."""
        found, texts = {}, {}
        for name, engine in self.engines.items():
            result = engine.chat(question, max_tokens=self._asked.max_tokens)
            found[name], texts[name] = result.stats, [each.id for each in result.tokens]
        assert texts["chosen"] == texts["suffix"] == texts["newest"], question
        return found

    def learn(self) -> LearningState:
        """What an idle process would do, without looking at the machine."""
        learner = self._learner
        assert learner is not None
        learner._writer.submit(lambda: None).result()
        before = self.folder.state().candidate
        anywhere = Conditions(system=Path("/nonexistent"))
        Sitting(self.folder, learner._parts.assignment(), anywhere).run()
        learner._take_chosen()
        if (state := self.folder.state()).candidate != before:
            self.use_newest(state)
        return state

    def use_newest(self, state: LearningState) -> None:
        if state.candidate is not None:
            config = self.engines["newest"].parts.model.config
            network = open_learnt_head(self.folder.head(state.candidate), config)
            self._newest.given = LearntHead(network, state.stats)


def curve(day: Day, asked: argparse.Namespace) -> list[Row]:
    rows = []
    for number, question in enumerate(questions(asked.questions, asked.manuals, asked.seed), 1):
        stats = day.answer(question)
        began_s = time.perf_counter()
        drafts = day.engines["chosen"].parts.learner.head() is not None
        state = day.learn()
        row = Row(
            number=number,
            tokens=stats["suffix"].predicted_n,
            tokens_a_round={n: each.predicted_n / each.rounds for n, each in stats.items()},
            per_second={n: each.predicted_per_second for n, each in stats.items()},
            drafts=drafts,
            learnt_tokens=state.learnt_tokens,
            gain=state.trials[-1].gain if state.trials else None,
            sitting_s=time.perf_counter() - began_s,
            accepted_by_head={n: _accepted(each) for n, each in stats.items()},
        )
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    return rows


def rates(day: Day, asked: argparse.Namespace) -> None:
    """Tokens a second over the last questions, engines in turns."""
    day.use_newest(day.folder.state())
    every = list(questions(asked.questions, asked.manuals, asked.seed))
    day.answer(every[0])  # what is loaded at first use
    totals = {name: np.zeros(2) for name in day.engines}
    for question in every[-asked.last :]:
        for name, stats in day.answer(question).items():
            totals[name] += (stats.predicted_n, stats.predicted_ms / 1e3)
    drafts = day.engines["chosen"].parts.learner.head() is not None
    found = {name: float(n / s) for name, (n, s) in totals.items()}
    print(json.dumps({"per_second": found, "a head is chosen": drafts, **describe_machine()}))


def delay(day: Day, asked: argparse.Namespace, pairs: int = 8, wait_s: float = 4.0) -> None:
    """Milliseconds to the first text, in turns."""
    learner, engine = day._learner, day.engines["chosen"]
    assert learner is not None
    learner._process._quiet_s = 0.1
    found: dict[str, list[float]] = {"alone": [], "while it learns": []}
    running = []
    for index, question in enumerate(questions(2 * pairs, asked.manuals, asked.seed)):
        name = list(found)[index % 2]
        with learner._folder.writing(learner._id):
            learner._folder.start_again()
        learner._parts = replace(learner._parts, is_idle=lambda: bool(index % 2))  # noqa: B023
        time.sleep(wait_s)
        lifeline = learner._process._lifeline
        running.append(lifeline is not None and not lifeline.has_ended)
        began_s = time.perf_counter()
        texts_s = [
            time.perf_counter() - began_s
            for chunk in engine.chat(f"{index}. {question}", stream=True, max_tokens=24)
            if chunk.text
        ]
        found[name].append(texts_s[0] * 1e3)
    told = {name: [round(each, 1) for each in values] for name, values in found.items()}
    medians = {name: float(np.median(values)) for name, values in found.items()}
    print(json.dumps({"median_ms": medians, "all_ms": told, "it ran": running}))


def _accepted(stats: Stats) -> float:
    """Tokens of the head that were accepted, of all tokens."""
    counts = stats.drafters.get("medusa")
    return 0.0 if counts is None else counts.draft_n_accepted / stats.predicted_n


def summary(rows: list[Row]) -> str:
    """Of parts of the day: tokens a round, weighted by tokens."""
    lines = []
    for part in np.array_split(np.array(rows, object), min(6, len(rows))):
        weights = [each.tokens for each in part]
        means = {
            name: sum(weights) / sum(each.tokens / each.tokens_a_round[name] for each in part)
            for name in part[0].tokens_a_round
        }
        told = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        lines.append(f"questions {part[0].number} to {part[-1].number}: {told}")
    return "\n".join(lines)


def _quiet(what: str, fraction: float) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--manuals", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="Where it is learnt; kept afterwards.")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--delay", action="store_true")
    parser.add_argument("--last", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with ExitStack() as opened:
        directory = asked.cache or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        _share_models(directory)
        day = Day(asked, opened)
        if asked.rates or asked.delay:
            (rates if asked.rates else delay)(day, asked)
            return
        rows = curve(day, asked)
        print(summary(rows), file=sys.stderr)
        if asked.out is not None:
            told = {
                "argv": sys.argv,
                "machine": describe_machine(),
                "rows": [asdict(each) for each in rows],
                "trials": [asdict(each) for each in day.folder.state().trials],
            }
            asked.out.write_text(json.dumps(told, indent=1), encoding="utf-8")


def _share_models(directory: Path) -> None:
    """The cache that learns is another one; models are those of the user's."""
    own = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    for path in own.iterdir() if own.is_dir() else ():
        if path.name != "learnt" and not (directory / path.name).exists():
            (directory / path.name).symlink_to(path.resolve())
    os.environ[CACHE_VARIABLE] = str(directory)


if __name__ == "__main__":
    main()

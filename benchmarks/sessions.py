"""Compares a first session with a tenth one, and drafting with plain decoding on a busy machine.

    python benchmarks/sessions.py first MODEL [--draft MODEL] [--drafter NAMES] [--prompts FILE]
    python benchmarks/sessions.py busy MODEL [--draft MODEL] [--load 2] [--prompts FILE]

MODEL: a name of real_models.py or a file. `first`: ten sessions, each a process, write the same
prompts with one cache; then a session with an empty cache and one with that cache take turns. The
drafters named by `--each` are forced in sessions of their own, by turns with both.

`busy`: two processes take the processor's time, one always and one now and then. Drafting, plain
decoding and plain decoding again take turns within an answer: whoever has had less time goes on for
a few rounds, so that what else the machine does is the same for all. The second plain answer shows
what is noise. Of each prompt the median of `--turns` answers counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.engine.generation import Generation

_SESSIONS = 10
_BLOCK = 8  # chunks of an answer, before the other one may go on
_BUSY_S = (0.5, 3.0)  # that the second process computes, and rests


def _options(args: argparse.Namespace, drafter: str) -> dict[str, Any]:
    options: dict[str, Any] = {"drafter": drafter, "keeps_answers": False}
    asks_draft = any(name in drafter for name in ("auto", "draft-model", "cascade"))
    return options | ({"draft": args.draft} if args.draft and asks_draft else {})


def _prompts(args: argparse.Namespace) -> list[str]:
    return [each["prompt"] for each in read_prompts(args.prompts)][args.skip :][: args.count]


def write_session(args: argparse.Namespace) -> None:
    """Print tokens a second of each prompt, in a session of its own."""
    rates = []
    with open_engine(args.model, **_options(args, args.drafter)) as engine:
        for prompt in _prompts(args):
            stats = engine.generate(engine.chat_prompt(prompt), max_tokens=args.tokens).stats
            rates.append(1e3 * stats.predicted_n / stats.predicted_ms)
    print(json.dumps(rates))


def _session(args: argparse.Namespace, cache: Path, drafter: str) -> list[float]:
    words = [sys.executable, __file__, "session", args.model, "--drafter", drafter]
    words += ["--prompts", str(args.prompts), "--count", str(args.count), "--skip", str(args.skip)]
    words += ["--tokens", str(args.tokens), *(["--draft", args.draft] if args.draft else [])]
    environment = {**os.environ, "EDGE_SPEC_CACHE": str(cache)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_first(args: argparse.Namespace) -> dict[str, Any]:
    """Return the median rate of each prompt by the kind of session, and their ratios."""
    with TemporaryDirectory() as folder:
        kept, base = Path(folder) / "kept", Path(folder) / "base"
        _session(args, base, "none")  # fetches, converts and compiles what all of them use
        shutil.rmtree(base / "measurements", ignore_errors=True)
        shutil.copytree(base, kept)
        learning = [_session(args, kept, args.drafter) for _ in range(_SESSIONS - 1)]
        kinds = ("first", "tenth", *args.each)
        rates: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for turn in range(args.turns):
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                cache = Path(folder) / f"{kind} {turn}"
                shutil.copytree(kept if kind == "tenth" else base, cache)
                drafter = args.drafter if kind in ("first", "tenth") else kind
                rates[kind].append(_session(args, cache, drafter))
                shutil.rmtree(cache)
    by_prompt = {
        kind: [median(turn) for turn in zip(*found, strict=True)] for kind, found in rates.items()
    }
    first, tenth = _total(by_prompt["first"]), _total(by_prompt["tenth"])
    best = [max(rates) for rates in zip(*(by_prompt[kind] for kind in args.each), strict=True)]
    return {
        "sessions before the tenth": [_total(each) for each in learning],
        "tokens/s": by_prompt,
        "first over tenth": first / tenth,
        "first over the best drafter of each prompt": first / _total(best) if best else None,
        "tenth over the best drafter of each prompt": tenth / _total(best) if best else None,
    }


def _total(rates: Sequence[float]) -> float:
    """Return the rate of all prompts, each of which writes as many tokens."""
    return len(rates) / sum(1 / rate for rate in rates)


def _compute(seed: int | None) -> None:
    """Take a core's time for ever; with a seed, now and then."""
    rng = random.Random(seed)
    while True:
        end = time.monotonic() + (rng.uniform(*_BUSY_S) if seed is not None else 1.0)
        while time.monotonic() < end:
            sum(range(20_000))
        if seed is not None:
            time.sleep(rng.uniform(*_BUSY_S))


@contextmanager
def _busy(load: int) -> Iterator[None]:
    others = [
        multiprocessing.Process(target=_compute, args=(None if i == 0 else i,), daemon=True)
        for i in range(load)
    ]
    for each in others:
        each.start()
    try:
        yield
    finally:
        for each in others:
            each.terminate()


def compare_busy(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of drafting, and of plain decoding again, over plain decoding's."""
    with (
        open_engine(args.model, **_options(args, args.drafter)) as drafting,
        closing(drafting.fork()) as plain,
        closing(drafting.fork()) as again,
        _busy(args.load),
    ):
        engines = (drafting, plain, again)
        plain.set_drafter("none")
        again.set_drafter("none")
        prompts = _prompts(args)
        _write_in_turns(engines, prompts[0], args.tokens)  # the first passes take longer
        rates = []
        for prompt in prompts:
            turns = [_write_in_turns(engines, prompt, args.tokens) for _ in range(args.turns)]
            rates.append([median(turn) for turn in zip(*turns, strict=True)])
            print(*(f"{rate:.1f}" for rate in rates[-1]), "tokens/s", file=sys.stderr)
    of_all = [_total(each) for each in zip(*rates, strict=True)]
    return {
        name: {
            "of plain": of_all[which] / of_all[1],
            "worst": min(each[which] / each[1] for each in rates),
            "prompts": [each[which] / each[1] for each in rates],
        }
        for which, name in ((0, "drafting"), (2, "plain again"))
    }


def _answer(engine: Any, prompt: str, tokens: int) -> Generation:
    tokens_of = engine.chat_prompt(prompt)
    answer: Generation = engine.generate(tokens_of, max_tokens=tokens, stream=True)
    return answer


def _write_in_turns(engines: Sequence[Any], prompt: str, tokens: int) -> list[float]:
    """Return the tokens a second of each answer, which are written in blocks by turns. The first
    chunk is the prompt's, and does not count."""
    answers = [_answer(engine, prompt, tokens) for engine in engines]
    seconds, done = [0.0] * len(answers), [False] * len(answers)
    for answer in answers:
        next(answer, None)
    begun = [len(answer.result.tokens) for answer in answers]
    while not all(done):
        which = min((i for i in range(len(answers)) if not done[i]), key=seconds.__getitem__)
        start = time.perf_counter()
        for _ in range(_BLOCK):
            if next(answers[which], None) is None:
                done[which] = True
                break
        seconds[which] += time.perf_counter() - start
    counts = [len(each.result.tokens) - before for each, before in zip(answers, begun, strict=True)]
    return [count / taken for count, taken in zip(counts, seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("first", "busy", "session"))
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--each", nargs="*", default=[], help="drafters that are forced, too")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--load", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "session":
        write_session(args)
        return
    found = (compare_first if args.what == "first" else compare_busy)(args)
    print(json.dumps(found, indent=1))
    report({args.what: found}, args.json)


if __name__ == "__main__":
    main()

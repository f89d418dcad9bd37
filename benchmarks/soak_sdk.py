"""Asks the SDK for a soak run, in a process of its own.

    python benchmarks/soak_sdk.py MODEL CONTEXT THREADS [--draft DRAFT]

It reads the number of a step, a line, and prints the outcomes of the step's requests as a line of
JSON. It ends with its input.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from common import open_engine
from soak_askers import (
    ANSWER_TOKENS,
    DRAFTERS,
    DRAFTERS_OF_PAIR,
    FOLLOW_UPS,
    NUM_CONVERSATIONS,
    SAMPLED,
    SCHEMA,
    Asker,
    Outcome,
    filler,
    opening,
    wrong_json,
)

from edge_spec import Engine, Grammar, SamplingParams
from edge_spec.engine.results import FinishReason
from edge_spec.errors import ContextFullError


class SdkAsker(Asker):
    """Asks one engine. folder: its snapshot is kept there."""

    def __init__(self, engine: Engine, exact: bool, drafters: Sequence[str], folder: Path) -> None:
        super().__init__(drafters, exact)
        self._engine = engine
        self._snapshot = folder / f"exact-{exact}.snapshot"
        self._filler = engine.encode(filler(100))
        self.steps += [self.at_the_limit, self.cancelled, self.restored, self.forked]

    def chat(self, messages: Any, stream: bool = False, **more: Any) -> str:
        if stream:
            return "".join(chunk.text for chunk in self._stream(messages))
        return self._engine.chat(messages, max_tokens=ANSWER_TOKENS).text

    def _stream(self, messages: Any) -> Any:
        return self._engine.stream(messages, max_tokens=ANSWER_TOKENS)

    def sample(self, prompt: str, seed: int) -> str:
        params = SamplingParams(**SAMPLED, seed=seed)
        return self._engine.chat(prompt, sampling=params, max_tokens=ANSWER_TOKENS).text

    def fit_schema(self, prompt: str) -> tuple[str, str | None]:
        form = Grammar.json_schema(SCHEMA)
        result = self._engine.chat(prompt, grammar=form, max_tokens=ANSWER_TOKENS)
        ended = result.finish_reason is FinishReason.STOP
        return result.text, wrong_json(result.text) if ended else None

    def is_full(self, messages: list[dict[str, str]]) -> bool:
        return len(self._engine.chat_prompt(messages)) > self._engine.context_length

    def at_the_limit(self, random: Random) -> list[Outcome]:
        """Asks prompts that leave room for a few tokens only, or for none."""
        room = random.choice((0, 1, 7, 30))
        ids = self._filler[: self._engine.context_length - room]
        result = self._engine.generate(ids)
        most = room + 1  # the last token has no place in the cache and needs none
        error = None
        if result.finish_reason is not FinishReason.STOP and len(result.tokens) != most:
            error = f"{len(result.tokens)} tokens at room for {most}: {result.finish_reason}"
        found = [Outcome("at the limit", self._key("limit", room), result.text, error)]
        try:
            self._engine.generate(self._filler[: self._engine.context_length + 1])
        except ContextFullError:
            return found
        return [*found, Outcome("at the limit", error="a token beyond the context was read")]

    def other_drafter(self, random: Random) -> list[Outcome]:
        """Changes from one drafter to another in the middle of an answer."""
        prompt, text = random.choice(self._prompts), ""
        before = self._engine.drafter
        try:
            for chunk in self._stream(prompt):
                text += chunk.text
                if random.random() < 0.2:
                    self._engine.set_drafter(random.choice(self._drafters))
        finally:
            self._engine.set_drafter(before)
        return [self._same("other drafter", prompt, text)]

    def cancelled(self, random: Random) -> list[Outcome]:
        generation = self._stream(random.choice(self._prompts))
        for number, _ in enumerate(generation):
            if number == 5:
                generation.cancel()
        return [Outcome("cancelled")]

    def left(self, random: Random) -> list[Outcome]:
        """Left in the middle; the next request ends it."""
        for _ in islice(self._stream(random.choice(self._prompts)), 5):
            pass
        return [Outcome("left")]

    def restored(self, random: Random) -> list[Outcome]:
        """A conversation that goes on after others have had the cache."""
        number = random.randrange(NUM_CONVERSATIONS)
        first = self.chat(opening(number))
        self._engine.snapshot(self._snapshot, note={"number": number})
        between = self.whole(random)
        self._engine.restore(self._snapshot)
        answered = {"role": "assistant", "content": first}
        messages = [*opening(number), answered, {"role": "user", "content": FOLLOW_UPS[1]}]
        asked = self._key("conversation", number, len(messages))
        return [*between, Outcome("restored", asked, self.chat(messages))]

    def forked(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        with self._engine.fork() as other:
            text = other.chat(prompt, max_tokens=ANSWER_TOKENS).text
        return [self._same("forked", prompt, text)]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("context", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--draft-runtime", default="auto")
    arguments = parser.parse_args()
    options = {
        "context_length": arguments.context,
        "threads": arguments.threads,
        "draft": tuple(arguments.draft),
        "draft_runtime": arguments.draft_runtime,
    }
    drafters = DRAFTERS_OF_PAIR if arguments.draft else DRAFTERS
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        askers = []
        for exact in (False, True):
            engine = open_engine(arguments.model, exact=exact, **options)
            askers.append(SdkAsker(opened.enter_context(engine), exact, drafters, folder))
        print(json.dumps([]), flush=True)
        for line in sys.stdin:
            number = int(line)
            exact = number // len(askers[0].steps) % 4 == 3
            print(json.dumps([asdict(each) for each in askers[exact].step(number)]), flush=True)


if __name__ == "__main__":
    main()

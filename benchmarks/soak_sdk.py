"""The process of a soak run that asks the SDK: a number a line on standard input, of a step; the
outcomes of the step's requests as JSON, a line, on standard output. Ends with its input."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from common import open_engine
from soak_requests import (
    ANSWER_TOKENS,
    DRAFTERS,
    DRAFTERS_OF_PAIR,
    FILLER,
    FOLLOW_UPS,
    NUM_CONVERSATIONS,
    SAMPLED,
    SCHEMA,
    SEEDS,
    Outcome,
    key,
    opening,
    prompts,
)

from edge_spec import Engine, Grammar, SamplingParams
from edge_spec.engine.results import FinishReason
from edge_spec.errors import ContextFullError


class Asker:
    """Asks one engine. exact: whether it decodes in exact mode. drafters: it can be changed to."""

    def __init__(self, engine: Engine, exact: bool, drafters: Sequence[str], folder: Path) -> None:
        self._engine = engine
        self._exact = exact
        self._drafters = drafters
        self._snapshot = folder / f"exact-{exact}.snapshot"
        self._prompts = prompts()
        self._talks = [opening(number) for number in range(NUM_CONVERSATIONS)]
        self._filler = engine.encode("".join(FILLER.format(number=n) for n in range(100)))
        self.steps: list[Callable[[Random], list[Outcome]]] = [
            *(self.whole, self.streamed, self.sampled, self.schema, self.at_the_limit),
            *(self.beyond, self.conversation, self.changed_drafter, self.cancelled, self.closed),
            *(self.restored, self.forked),
        ]

    def whole(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [self._same("whole", prompt, self._engine.chat(prompt, **self._short).text)]

    def streamed(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        chunks = self._engine.stream(prompt, **self._short)
        return [self._same("streamed", prompt, "".join(chunk.text for chunk in chunks))]

    def sampled(self, random: Random) -> list[Outcome]:
        prompt, seed = random.choice(self._prompts), random.randrange(SEEDS)
        params = SamplingParams(**SAMPLED, seed=seed)
        text = self._engine.chat(prompt, sampling=params, **self._short).text
        asked = key(self._exact, "sampled", prompt, seed)
        return [Outcome("sampled", asked, text, sampled=True)]

    def schema(self, random: Random) -> list[Outcome]:
        prompt, form = random.choice(self._prompts), Grammar.json_schema(SCHEMA)
        result = self._engine.chat(prompt, grammar=form, **self._short)
        error = None
        if result.finish_reason is FinishReason.STOP:
            error = wrong_json(result.text)
        return [Outcome("schema", key(self._exact, "schema", prompt), result.text, error)]

    def at_the_limit(self, random: Random) -> list[Outcome]:
        """Asks prompts that leave room for a few tokens only."""
        room = random.choice((0, 1, 7, 30))
        ids = self._filler[: self._engine.context_length - room]
        result = self._engine.generate(ids)
        most = room + 1  # the last token has no place in the cache and needs none
        error = None
        if result.finish_reason is not FinishReason.STOP and len(result.tokens) != most:
            error = f"{len(result.tokens)} tokens at room for {most}: {result.finish_reason}"
        return [Outcome("at the limit", key(self._exact, "limit", room), result.text, error)]

    def beyond(self, random: Random) -> list[Outcome]:
        try:
            self._engine.generate(self._filler[: self._engine.context_length + 1])
        except ContextFullError:
            return [Outcome("beyond")]
        return [Outcome("beyond", error="a prompt beyond the context was answered")]

    def conversation(self, random: Random) -> list[Outcome]:
        """One more turn of one; when its context is full, it begins again."""
        number = random.randrange(NUM_CONVERSATIONS)
        messages = self._talks[number]
        full = len(self._engine.chat_prompt(messages)) > self._engine.context_length
        try:
            text = self._engine.chat(messages, **self._short).text
        except ContextFullError:
            self._talks[number] = opening(number)
            return [Outcome("conversation", error=None if full else "refused with room left")]
        if full:
            return [Outcome("conversation", error="a full context was answered")]
        asked = key(self._exact, "conversation", number, len(messages))
        follow_up = FOLLOW_UPS[len(messages) % len(FOLLOW_UPS)]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": follow_up})
        return [Outcome("conversation", asked, text)]

    def changed_drafter(self, random: Random) -> list[Outcome]:
        """Changes from one drafter to another in the middle of an answer."""
        prompt, text = random.choice(self._prompts), ""
        before = self._engine.drafter
        try:
            for chunk in self._engine.stream(prompt, **self._short):
                text += chunk.text
                if random.random() < 0.2:
                    self._engine.set_drafter(random.choice(self._drafters))
        finally:
            self._engine.set_drafter(before)
        return [self._same("changed drafter", prompt, text)]

    def cancelled(self, random: Random) -> list[Outcome]:
        generation = self._engine.stream(random.choice(self._prompts), **self._short)
        for number, _ in enumerate(generation):
            if number == 5:
                generation.cancel()
        return [Outcome("cancelled")]

    def closed(self, random: Random) -> list[Outcome]:
        """Left in the middle; the next request ends it."""
        for _ in islice(self._engine.stream(random.choice(self._prompts), **self._short), 5):
            pass
        return [Outcome("left")]

    def restored(self, random: Random) -> list[Outcome]:
        """A conversation that goes on after others have had the cache."""
        number = random.randrange(NUM_CONVERSATIONS)
        first = self._engine.chat(opening(number), **self._short).text
        self._engine.snapshot(self._snapshot, note={"number": number})
        between = self.whole(random)
        self._engine.restore(self._snapshot)
        answered = {"role": "assistant", "content": first}
        messages = [*opening(number), answered, {"role": "user", "content": FOLLOW_UPS[1]}]
        text = self._engine.chat(messages, **self._short).text
        asked = key(self._exact, "conversation", number, len(messages))
        return [*between, Outcome("restored", asked, text)]

    def forked(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        with self._engine.fork() as other:
            text = other.chat(prompt, **self._short).text
        return [self._same("forked", prompt, text)]

    @property
    def _short(self) -> Any:
        return {"max_tokens": ANSWER_TOKENS}

    def _same(self, kind: str, prompt: str, text: str) -> Outcome:
        return Outcome(kind, key(self._exact, "chat", prompt), text)


def wrong_json(text: str) -> str | None:
    try:
        fits = set(json.loads(text)) == set(SCHEMA["required"])
    except ValueError:
        fits = False
    return None if fits else f"does not fit the schema: {text!r}"


def step(asker: Asker, number: int) -> list[Outcome]:
    chosen = asker.steps[number % len(asker.steps)]
    try:
        return chosen(Random(number))
    except Exception as error:  # is what the run looks for
        return [Outcome(chosen.__name__, error=f"{type(error).__name__}: {error}")]


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
            askers.append(Asker(opened.enter_context(engine), exact, drafters, folder))
        print(json.dumps([]), flush=True)
        for line in sys.stdin:
            number = int(line)
            exact = number // len(askers[0].steps) % 4 == 3
            outcomes = step(askers[exact], number)
            print(json.dumps([each.to_json() for each in outcomes]), flush=True)


if __name__ == "__main__":
    main()

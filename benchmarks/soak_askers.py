"""Asks for a soak run: what is asked, what came of it, and who asks a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from random import Random
from typing import Any

from common import OWN_PROMPTS, read_prompts

from edge_spec.errors import ContextFullError

ANSWER_TOKENS = 40
SEEDS = 3
NUM_PROMPTS = 10
FOLLOW_UPS = ("Tell me more.", "Why is that?", "Give an example.", "Say it in one sentence.")
NUM_CONVERSATIONS = 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40}
DRAFTERS = ("none", "auto", "suffix", "recycling", "lookahead", "suffix,recycling")
DRAFTERS_OF_PAIR = (*DRAFTERS, "draft-model", "draft-model,suffix")
FILLER = "The quick brown fox jumps over the lazy dog, and number {number} follows. "
TIMEOUT_S = 120.0
FULL = "context_length_exceeded"


@dataclass(frozen=True)
class Outcome:
    """Holds what came of one request. key: what was asked, the same for the same request whichever
    way it came; None where the text is not compared. sampled: with a seed, else greedily."""

    kind: str
    key: str | None = None
    text: str = ""
    error: str | None = None
    sampled: bool = False


class RefusedError(Exception):
    """code: of the error, as OpenAI's API names it."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        super().__init__(f"{status}: {document['error']['message']}")
        self.code = document["error"]["code"]


def filler(count: int) -> str:
    return "".join(FILLER.format(number=number) for number in range(count))


def opening(number: int) -> list[dict[str, str]]:
    """The first message of a conversation that grows until its context is full."""
    return [{"role": "user", "content": f"Tell me a fact about the number {number + 2}."}]


class Asker:
    """Asks in the ways that the SDK and the server share. exact: whether it decodes in exact mode.
    drafters: requests may name them."""

    def __init__(self, drafters: Sequence[str], exact: bool = False) -> None:
        self._drafters = drafters
        self._exact = exact
        self._prompts = [entry["prompt"] for entry in read_prompts(OWN_PROMPTS)][:NUM_PROMPTS]
        self._talks = [opening(number) for number in range(NUM_CONVERSATIONS)]
        self.steps: list[Callable[[Random], list[Outcome]]] = [
            *(self.whole, self.streamed, self.sampled, self.schema, self.beyond),
            *(self.conversation, self.other_drafter, self.left),
        ]

    def step(self, number: int) -> list[Outcome]:
        chosen = self.steps[number % len(self.steps)]
        try:
            return chosen(Random(number))
        except Exception as error:  # is what the run looks for
            return [Outcome(chosen.__name__, error=f"{type(error).__name__}: {error}")]

    def chat(self, messages: Any, stream: bool = False, **more: Any) -> str:
        """Returns the answer's text. Raises ContextFullError and what the way of asking raises."""
        raise NotImplementedError

    def sample(self, prompt: str, seed: int) -> str:
        raise NotImplementedError

    def fit_schema(self, prompt: str) -> tuple[str, str | None]:
        """Returns an answer that has to fit SCHEMA, and what is wrong with it."""
        raise NotImplementedError

    def other_drafter(self, random: Random) -> list[Outcome]:
        raise NotImplementedError

    def left(self, random: Random) -> list[Outcome]:
        raise NotImplementedError

    def is_full(self, messages: list[dict[str, str]]) -> bool | None:
        """Returns whether the messages go beyond the context; None where nobody knows before."""
        return None

    def whole(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [self._same("whole", prompt, self.chat(prompt))]

    def streamed(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [self._same("streamed", prompt, self.chat(prompt, stream=True))]

    def sampled(self, random: Random) -> list[Outcome]:
        prompt, seed = random.choice(self._prompts), random.randrange(SEEDS)
        text = self.sample(prompt, seed)
        return [Outcome("sampled", self._key("sampled", prompt, seed), text, sampled=True)]

    def schema(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [Outcome("schema", self._key("schema", prompt), *self.fit_schema(prompt))]

    def beyond(self, random: Random) -> list[Outcome]:
        try:
            self.chat(filler(200))
        except ContextFullError:
            return [Outcome("beyond")]
        return [Outcome("beyond", error="a prompt beyond the context was answered")]

    def conversation(self, random: Random) -> list[Outcome]:
        """One more turn of one; when its context is full, it begins again."""
        number = random.randrange(NUM_CONVERSATIONS)
        messages = self._talks[number]
        full = self.is_full(messages)
        try:
            text = self.chat(messages, stream=True, session_id=f"conversation {number}")
        except ContextFullError:
            self._talks[number] = opening(number)
            error = "refused with room left" if full is False else None
            return [Outcome("conversation", error=error)]
        if full:
            return [Outcome("conversation", error="a full context was answered")]
        asked = self._key("conversation", number, len(messages))
        follow_up = FOLLOW_UPS[len(messages) % len(FOLLOW_UPS)]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": follow_up})
        return [Outcome("conversation", asked, text)]

    def _same(self, kind: str, prompt: str, text: str) -> Outcome:
        return Outcome(kind, self._key("chat", prompt), text)

    def _key(self, *what: object) -> str:
        """Exact mode may write another text: it is bit-identical to plain decoding in its own
        mode."""
        return json.dumps([self._exact, *what])


class HttpAsker(Asker):
    """Asks the server at a port. Connections are not kept."""

    def __init__(self, port: int, drafters: Sequence[str]) -> None:
        super().__init__(drafters)
        self._port = port
        self.steps += [self.two_at_once, self.malformed]

    def chat(self, messages: Any, stream: bool = False, **more: Any) -> str:
        """Raises RefusedError, OSError, HTTPException and ValueError, too."""
        connection = self._connection()
        try:
            self._send(connection, messages, stream=stream, **more)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            refused = RefusedError(response.status, json.loads(content))
            if refused.code == FULL:
                raise ContextFullError(str(refused), remedy="") from refused
            raise refused
        if stream:
            return streamed_text(content)
        text: str = json.loads(content)["choices"][0]["message"]["content"]
        return text

    def sample(self, prompt: str, seed: int) -> str:
        return self.chat(prompt, stream=bool(seed % 2), seed=seed, **SAMPLED)

    def fit_schema(self, prompt: str) -> tuple[str, str | None]:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        return self.chat(prompt, response_format=form), None

    def other_drafter(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        text = self.chat(prompt, speculative={"drafter": random.choice(self._drafters)})
        return [self._same("other drafter", prompt, text)]

    def left(self, random: Random) -> list[Outcome]:
        """A client that goes in the middle of its answer."""
        connection = self._connection()
        try:
            self._send(connection, random.choice(self._prompts), stream=True)
            connection.getresponse().readline()
        finally:
            connection.close()
        return [Outcome("left")]

    def two_at_once(self, random: Random) -> list[Outcome]:
        asked = random.sample(self._prompts, 2)
        with ThreadPoolExecutor(2) as clients:
            texts = list(clients.map(self.chat, asked))
        return [self._same("two at once", *pair) for pair in zip(asked, texts, strict=True)]

    def malformed(self, random: Random) -> list[Outcome]:
        try:
            self.chat([{"role": "nobody", "content": 3}])
        except RefusedError:
            return [Outcome("malformed")]
        return [Outcome("malformed", error="a malformed request was answered")]

    def _connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def _send(self, connection: HTTPConnection, messages: Any, **more: Any) -> None:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        asked = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode(), headers)


def streamed_text(content: bytes) -> str:
    """Raises ValueError for a stream that broke off or has an error."""
    lines = [line.removeprefix("data: ") for line in content.decode().splitlines() if line]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("the stream broke off")
    text = ""
    for event in map(json.loads, lines[:-1]):
        if "error" in event:
            raise ValueError(event["error"]["message"])
        if event["choices"]:
            text += event["choices"][0]["delta"].get("content") or ""
    return text


def wrong_json(text: str) -> str | None:
    try:
        fits = set(json.loads(text)) == set(SCHEMA["required"])
    except ValueError:
        fits = False
    return None if fits else f"does not fit the schema: {text!r}"

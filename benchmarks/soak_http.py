"""Asks a server for a soak run, one step after the other, as clients of every kind would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from random import Random
from typing import Any

from soak_requests import (
    ANSWER_TOKENS,
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

TIMEOUT_S = 120.0
FULL = "context_length_exceeded"


class RefusedError(Exception):
    """code: of the error, as OpenAI's API names it."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        super().__init__(f"{status}: {document['error']['message']}")
        self.code = document["error"]["code"]


class HttpAsker:
    """Asks the server at a port. Connections are not kept. drafters: requests may name."""

    def __init__(self, port: int, drafters: Sequence[str]) -> None:
        self._port = port
        self._drafters = drafters
        self._prompts = prompts()
        self._talks = [opening(number) for number in range(NUM_CONVERSATIONS)]
        self.steps: list[Callable[[Random], list[Outcome]]] = [
            *(self.whole, self.streamed, self.sampled, self.schema, self.beyond),
            *(self.conversation, self.other_drafter, self.left, self.two_at_once, self.malformed),
        ]

    def whole(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [self._same("whole", prompt, self._chat(prompt))]

    def streamed(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        return [self._same("streamed", prompt, self._chat(prompt, stream=True))]

    def sampled(self, random: Random) -> list[Outcome]:
        prompt, seed = random.choice(self._prompts), random.randrange(SEEDS)
        text = self._chat(prompt, stream=bool(seed % 2), seed=seed, **SAMPLED)
        return [Outcome("sampled", key(False, "sampled", prompt, seed), text, sampled=True)]

    def schema(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        text = self._chat(prompt, response_format=form)
        return [Outcome("schema", key(False, "schema", prompt), text)]

    def beyond(self, random: Random) -> list[Outcome]:
        text = "".join(FILLER.format(number=number) for number in range(200))
        try:
            self._chat(text)
        except RefusedError as refused:
            if refused.code == FULL:
                return [Outcome("beyond")]
            raise
        return [Outcome("beyond", error="a prompt beyond the context was answered")]

    def conversation(self, random: Random) -> list[Outcome]:
        """One more turn of one; when its context is full, it begins again."""
        number = random.randrange(NUM_CONVERSATIONS)
        messages = self._talks[number]
        try:
            text = self._chat(messages, stream=True, session_id=f"conversation {number}")
        except RefusedError as refused:
            if refused.code != FULL:
                raise
            self._talks[number] = opening(number)
            return [Outcome("conversation")]
        asked = key(False, "conversation", number, len(messages))
        follow_up = FOLLOW_UPS[len(messages) % len(FOLLOW_UPS)]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": follow_up})
        return [Outcome("conversation", asked, text)]

    def other_drafter(self, random: Random) -> list[Outcome]:
        prompt = random.choice(self._prompts)
        text = self._chat(prompt, speculative={"drafter": random.choice(self._drafters)})
        return [self._same("other drafter", prompt, text)]

    def left(self, random: Random) -> list[Outcome]:
        """A client that goes in the middle of its answer."""
        connection, body = self._connection(), self._body(random.choice(self._prompts), stream=True)
        try:
            connection.request("POST", "/v1/chat/completions", body)
            connection.getresponse().readline()
        finally:
            connection.close()
        return [Outcome("left")]

    def two_at_once(self, random: Random) -> list[Outcome]:
        asked = random.sample(self._prompts, 2)
        with ThreadPoolExecutor(2) as clients:
            texts = list(clients.map(self._chat, asked))
        return [
            self._same("two at once", prompt, text)
            for prompt, text in zip(asked, texts, strict=True)
        ]

    def malformed(self, random: Random) -> list[Outcome]:
        try:
            self._chat([{"role": "nobody", "content": 3}])
        except RefusedError:
            return [Outcome("malformed")]
        return [Outcome("malformed", error="a malformed request was answered")]

    def _same(self, kind: str, prompt: str, text: str) -> Outcome:
        return Outcome(kind, key(False, "chat", prompt), text)

    def _connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def _body(self, messages: Any, **more: Any) -> bytes:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        asked = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        return json.dumps(asked).encode()

    def _chat(self, messages: Any, **more: Any) -> str:
        """The answer's text. Raises RefusedError, OSError, HTTPException and ValueError."""
        connection = self._connection()
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                self._body(messages, **more),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RefusedError(response.status, json.loads(content))
        if not more.get("stream"):
            text: str = json.loads(content)["choices"][0]["message"]["content"]
            return text
        return streamed_text(content)


def streamed_text(content: bytes) -> str:
    """Raises ValueError for a stream that broke off or tells an error."""
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


def step(asker: HttpAsker, number: int) -> list[Outcome]:
    chosen = asker.steps[number % len(asker.steps)]
    try:
        return chosen(Random(number))
    except (RefusedError, OSError, HTTPException, ValueError, KeyError) as error:
        return [Outcome(chosen.__name__, error=f"{type(error).__name__}: {error}")]

"""A conversation with one model: its messages, its engine, and saving and loading it.

A saved file is a snapshot of everything, or JSON with only the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.apps.answering import Stop
from edge_spec.core.recommended_sampling import sampling_source, sampling_text
from edge_spec.errors import UsageError
from edge_spec.storage.atomic import atomic_file

if TYPE_CHECKING:
    from edge_spec import ChatOptions, Chunk, Engine, GenerationResult
    from edge_spec.cli.options import SamplingOptions

# "role", "content", and for an answer with a thought "reasoning_content". The model's template
# decides whether later prompts show that thought.
Message = dict[str, str]
Report = Callable[[str, float], None]  # what is being done, and the fraction done
OnChunk = Callable[["Chunk"], None]
CountTokens = Callable[[Sequence[Message]], int]
# Opens a model with the command line's options; without a report, stderr shows progress.
Opener = Callable[[str, "Report | None"], "Engine"]
_ROLES = ("system", "user", "assistant")
_THOUGHT = "reasoning_content"


def num_to_leave_out(
    messages: Sequence[Message], count_tokens: CountTokens, context_length: int, answer_tokens: int
) -> int:
    """Return how many of the oldest messages prompts should leave out, not counting a system
    message at the start, which stays.

    0 if the answer has room, which means `answer_tokens` or a quarter of the context, whichever is
    less. Otherwise drop whole turns, each from one user message to the next, until half of the
    context is free. The shorter prompt is prefilled again: tokens moved within a KV cache would
    score differently than in plain decoding. The last turn stays if it fits the context alone; if
    not, return 0. count_tokens: of the prompt made from messages.
    """
    if count_tokens(messages) + min(answer_tokens, context_length // 4) <= context_length:
        return 0
    opening = [message for message in messages[:1] if message["role"] == "system"]
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for begin in turns:
        num_tokens = count_tokens([*opening, *messages[begin:]])
        most = context_length if begin == turns[-1] else context_length // 2
        if num_tokens <= most:
            return begin - len(opening)
    return 0


class ChatConversation:
    """The messages of a conversation, the open model and the latest answer.

    said: messages of user and assistant; prompts skip the first `left_out` of them. last: the
    latest answer. last_sampling: describes how it was drawn. running: the answer being written.
    One thread at a time calls the methods; any may call `stop.request`, and during an answer
    `set_drafter`.
    """

    def __init__(
        self, opener: Opener, model: str, asked: SamplingOptions, system: str | None
    ) -> None:
        """asked: takes precedence over the makers' recommendation. Raises EdgeSpecError if the
        model cannot be opened."""
        self.model = model
        self.system = system
        self.said: list[Message] = []
        self.left_out = 0
        self.turns: list[dict[str, Any]] = []  # for --json
        self.last: GenerationResult | None = None
        self.last_sampling = ""
        self.running: GenerationResult | None = None
        self.reading = ""  # percentage of the prompt that is prefilled
        self.plain_per_second: float | None = None  # measured by the latest answers
        self.is_plain = False
        self.is_terminal = False
        self.report: Report | None = None  # progress of opening a model; None: on stderr
        self.stop = Stop()
        self.files: set[Path] = set()  # saved to or loaded from, so /save may overwrite them
        # Whether answers begin with a thought, or its budget in tokens.
        self.reasoning = asked.thoughts
        self._opener = opener
        self._asked = asked
        self.engine = opener(model, None)
        self._sampling = self.engine.chat_sampling(**asked.asked)

    def close(self) -> None:
        self.engine.close()

    @property
    def answering(self) -> ChatOptions:
        limit = self._limit
        return {"max_tokens": limit, "sampling": self._sampling, "reasoning": self.reasoning}

    @property
    def _limit(self) -> int:
        form = self.engine.parts.text.answer_form((), reasoning=self.reasoning)
        return self._asked.limit(form)

    @property
    def messages(self) -> list[Message]:
        return [*self._opening, *self.said]

    def messages_for(self, text: str, *, again: bool = False) -> list[Message]:
        """Return the prompt's messages for a new message, or with `again` for the last one. Raises
        UsageError if `again` and there is none."""
        return [*self._opening, *self._until(text, again)[self.left_out :]]

    def make_room(self, text: str, *, again: bool = False) -> str | None:
        """Drop the oldest turns from prompts if the answer would not fit. Return a note for the
        user if any were dropped. Raises EdgeSpecError."""
        engine = self.engine
        more = num_to_leave_out(
            self.messages_for(text, again=again),
            lambda messages: len(engine.chat_prompt(messages, reasoning=self.reasoning)),
            engine.context_length,
            self._limit,
        )
        if not more:
            return None
        self.left_out += more
        return (
            f"The context of {engine.context_length} tokens is full: from now on the model does "
            f"not see the oldest {self.left_out} messages. /save keeps them, /reset begins again."
        )

    def answer(self, text: str, on_chunk: OnChunk, *, again: bool = False) -> GenerationResult:
        """Answer a message and add both to the conversation.

        What was written stays if the answer is stopped or fails. again: replaces the last message
        and its answer. Raises EdgeSpecError.
        """
        said, messages = self._until(text, again), self.messages_for(text, again=again)
        generation = self.engine.chat(messages, stream=True, **self.answering)
        self.reading, generation.progress = "", self._note_reading
        self.stop.watch(generation)
        result = self.running = generation.result
        try:
            for chunk in generation:
                on_chunk(chunk)
        finally:
            self.running = None
            failed = result.finish_reason == "error"
            has_content = result.text or result.reasoning
            if result.finish_reason is not None and (has_content or not failed):
                self._keep(said, result)
        self.plain_per_second = result.stats.plain_per_second or self.plain_per_second
        return result

    def _note_reading(self, what: str, fraction: float) -> None:
        self.reading = f"{fraction:.0%}"

    def _keep(self, said: list[Message], result: GenerationResult) -> None:
        thought = {_THOUGHT: result.reasoning} if result.reasoning else {}
        self.said = [*said, {"role": "assistant", "content": result.text, **thought}]
        source = sampling_source(self.engine.parts.text.sampling, self._asked.asked)
        self.last = result
        self.last_sampling = f"{sampling_text(self._sampling)} ({source})"
        prompt = said[-1]["content"]
        self.turns.append({"prompt": prompt, "left_out": self.left_out, **result.to_dict()})

    def last_prompt(self) -> str:
        """Raises UsageError if there is none."""
        return self.said[self._last_asked()]["content"]

    def take_back(self) -> str:
        """Drop the user's last message and what follows it, and return its text. Raises UsageError
        if there is none."""
        text = self.last_prompt()
        self.said = self.said[: self._last_asked()]
        self.left_out = min(self.left_out, len(self.said))
        return text

    def forget(self) -> None:
        self.said, self.left_out = [], 0

    def take_over(self, messages: list[Message]) -> None:
        """Replace the conversation by these messages; the first may be a system message."""
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.said, self.left_out = list(messages), 0
        self.last = None

    def open(self, model: str) -> None:
        """Switch to another model. Raises EdgeSpecError, keeping the present one."""
        engine = self._opener(model, self.report)
        self.engine.close()
        self.engine, self.model = engine, model
        self._sampling = engine.chat_sampling(**self._asked.asked)
        self.left_out = 0  # its context may hold more
        self.plain_per_second = None

    @property
    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _until(self, text: str, again: bool) -> list[Message]:
        said = self.said[: self._last_asked()] if again else self.said
        return [*said, {"role": "user", "content": text}]

    def _last_asked(self) -> int:
        """Return the last user message's index in `said`. Raises UsageError if there is none."""
        asked = [index for index, message in enumerate(self.said) if message["role"] == "user"]
        if not asked:
            raise UsageError("nothing was asked yet", remedy="Type a message first.")
        return asked[-1]


def save(conversation: ChatConversation, path: Path) -> str:
    """Save to a file and return a message for the user. Raises EdgeSpecError, OSError.

    A .json file gets only the messages; any other a snapshot, which only this model can continue,
    but without a prefill. Overwrite only files that this conversation was saved to or loaded from.
    """
    if path.exists() and path.resolve() not in conversation.files:
        raise UsageError(f"{path} exists", remedy="Choose another name, or delete it first.")
    note = {"messages": conversation.messages}
    if path.suffix == ".json":
        with atomic_file(path, 0o600) as work:  # conversations are private
            work.write_text(json.dumps(note, ensure_ascii=False, indent=1), encoding="utf-8")
    else:
        conversation.engine.snapshot(path, note)
    return _told(conversation, "saved in", path)


def load(conversation: ChatConversation, path: Path) -> str:
    """Replace the conversation by a saved one. If it raises EdgeSpecError or OSError, nothing has
    changed."""
    if path.suffix == ".json":
        try:
            note: Any = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise _no_conversation(path, str(error)) from error
    else:
        note = conversation.engine.restore(path)
    conversation.take_over(_read_messages(note, path))
    return _told(conversation, "loaded from", path)


def _read_messages(note: Any, path: Path) -> list[Message]:
    """Raises UsageError for anything but what `save` writes."""
    messages = note.get("messages") if isinstance(note, dict) else None
    if not isinstance(messages, list):
        raise _no_conversation(path, 'it has no "messages"')
    for index, message in enumerate(messages):
        known = isinstance(message, dict) and message.keys() - {_THOUGHT} == {"role", "content"}
        if not known or message["role"] not in _ROLES[index > 0 :]:
            raise _no_conversation(path, f"message {index + 1} has no known role")
        if not all(isinstance(text, str) for text in message.values()):
            raise _no_conversation(path, f"message {index + 1} has no text")
    return messages


def _no_conversation(path: Path, reason: str) -> UsageError:
    remedy = "Choose a file that /save wrote."
    return UsageError(f"{path} holds no conversation: {reason}", remedy=remedy)


def _told(conversation: ChatConversation, done: str, path: Path) -> str:
    conversation.files.add(path.resolve())
    count = len(conversation.said)
    return f"{count} {'message' if count == 1 else 'messages'} {done} {path}."

"""A conversation with one model: what was said, its engine, and how an answer is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from edge_spec.core.recommended_sampling import sampling_source, sampling_text
from edge_spec.errors import UsageError
from edge_spec.text.parts.answer_form import answer_tokens

if TYPE_CHECKING:
    from edge_spec import ChatOptions, Chunk, Engine, Generation, GenerationResult
    from edge_spec.text.thoughts import Reasoning

# "role", "content" and, of an answer, what was thought before it, "reasoning_content", which the
# model's template shows again or leaves out.
Message = dict[str, str]
Report = Callable[[str, float], None]  # what is being done, and how much of it is
OnChunk = Callable[["Chunk"], None]
CountTokens = Callable[[Sequence[Message]], int]


def num_to_leave_out(
    messages: Sequence[Message], count_tokens: CountTokens, context_length: int, answer_tokens: int
) -> int:
    """Returns how many of the oldest messages go, system messages at the beginning apart, which
    stay. 0 if there is room for an answer of `answer_tokens`, or of a quarter of the context if
    that is less; 0 also if the last turn alone is too long, so that nothing would be gained.

    Whole turns go: a message of the user with all that follows it up to the next one. So many go
    that half of the context is free, since the rest is read again each time; the last turn stays.
    count_tokens: of the prompt that messages make.

    Nothing is moved within a KV cache: tokens at other positions would have other scores than plain
    decoding gives them. The shorter conversation is a prompt of its own, which is read again.
    """
    answer_tokens = min(answer_tokens, context_length // 4)
    if count_tokens(messages) + answer_tokens <= context_length:
        return 0
    opening = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    turns = [i for i in range(opening, len(messages)) if messages[i]["role"] == "user"]
    first: int | None = None
    most_tokens = context_length  # of the last turn
    for begin in reversed(turns):
        if count_tokens([*messages[:opening], *messages[begin:]]) > most_tokens:
            break
        first, most_tokens = begin, context_length // 2
    return 0 if first is None else first - opening


class Opener(Protocol):
    """Opens a model as the command line's options say."""

    def __call__(self, model: str, *, exact: bool, report: Report | None) -> Engine:
        """report: None shows progress on stderr. Raises EdgeSpecError."""


class Stop:
    """Ends what is running, from any thread, even before its generation exists."""

    def __init__(self) -> None:
        self._lock = RLock()  # a signal may come while it is held
        self._generation: Generation | None = None
        self.requested = False

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Makes `request` within the block end what is watched; an earlier request is over."""
        self.requested = False
        try:
            yield
        finally:
            self._generation = None

    def watch(self, generation: Generation) -> None:
        with self._lock:
            self._generation = generation
            if self.requested:
                generation.cancel()

    def request(self) -> None:
        with self._lock:
            self.requested = True
            if self._generation is not None:
                self._generation.cancel()


class ChatConversation:
    """`said` is what user and assistant said, of which prompts leave the `left_out` oldest messages
    out; `last` the latest answer, `last_sampling` how it was drawn, in words, `running` the growing
    one.

    Its methods are called by one thread at a time; `stop.request` and, during an answer,
    `set_drafter` by any.
    """

    def __init__(
        self,
        opener: Opener,
        model: str,
        exact: bool,
        answering: ChatOptions,
        system: str | None,
        asked_sampling: Mapping[str, float],
    ) -> None:
        """Raises EdgeSpecError where the model cannot be opened.

        answering: but for `sampling`, which follows from the model and what is asked.
        """
        self.model = model
        self.exact = exact
        self.system = system
        self.said: list[Message] = []
        self.left_out = 0
        self.turns: list[dict[str, Any]] = []  # of --json
        self.last: GenerationResult | None = None
        self.last_sampling = ""
        self.running: GenerationResult | None = None
        self.reading = ""  # how far the prompt of the running answer is read, where it is long
        self.plain_per_second: float | None = None  # as the latest answers measured it
        self.is_plain = False  # Markdown is shown as it was written
        self.stop = Stop()
        self.files: set[Path] = set()  # that hold it, which may be written again
        self._opener = opener
        self._answering = answering
        self._asked_sampling = asked_sampling
        self.engine = opener(model, exact=exact, report=None)
        self._sampling = self.engine.chat_sampling(**asked_sampling)

    def close(self) -> None:
        self.engine.close()

    @property
    def answering(self) -> ChatOptions:
        """Returns how the model that is open answers."""
        limit = self._answering.get("max_tokens")
        if limit is None:
            form = self.engine.parts.text.answer_form((), reasoning=self.reasoning)
            limit = answer_tokens(form)
        return {**self._answering, "max_tokens": limit, "sampling": self._sampling}

    @property
    def reasoning(self) -> Reasoning:
        """Whether answers begin with a thought, or how long it may be."""
        return self._answering.get("reasoning") or "auto"

    @reasoning.setter
    def reasoning(self, reasoning: Reasoning) -> None:
        self._answering = {**self._answering, "reasoning": reasoning}

    @property
    def messages(self) -> list[Message]:
        """All of them."""
        return [*self._opening, *self.said]

    @property
    def asked_messages(self) -> list[Message]:
        """Those that prompts do not leave out."""
        return [*self._opening, *self.said[self.left_out :]]

    def make_room(self, text: str, *, again: bool = False) -> str | None:
        """Leaves the oldest turns out from now on, where the message that `answer` is to be called
        with would leave too little room for an answer; what to tell the user then. Raises
        EdgeSpecError."""
        engine = self.engine
        said = self._until(text, again)
        more = num_to_leave_out(
            [*self._opening, *said[self.left_out :]],
            lambda messages: len(engine.chat_prompt(messages, reasoning=self.reasoning)),
            engine.context_length,
            self.answering["max_tokens"] or engine.context_length,
        )
        if not more:
            return None
        self.left_out += more
        return (
            f"The context of {engine.context_length} tokens is full: from now on the model does "
            f"not see the oldest {self.left_out} messages. /save keeps them, /reset begins again."
        )

    def answer(self, text: str, on_chunk: OnChunk, *, again: bool = False) -> GenerationResult:
        """Adds the message and the answer to it; a stopped answer keeps what came of it.

        again: in place of the last message and its answer. Raises EdgeSpecError; the conversation
        is then as it was, but for an answer that had begun, of which what came stays.
        """
        said = self._until(text, again)
        generation = self._start([*self._opening, *said[self.left_out :]], self.answering)
        result = generation.result
        try:
            self._read(generation, on_chunk)
        finally:
            failed = result.finish_reason == "error"
            if result.finish_reason is not None and not (failed and not _has_content(result)):
                self.said = [*said, _message(result)]
                self.last, self.last_sampling = result, self._told_sampling()
                self.turns.append({"prompt": text, "left_out": self.left_out, **result.to_dict()})
        return result

    def generate(
        self, messages: list[Message], on_chunk: OnChunk, options: ChatOptions
    ) -> GenerationResult:
        """An answer that the conversation does not keep. Raises EdgeSpecError."""
        generation = self._start(messages, options)
        self._read(generation, on_chunk)
        return generation.result

    def _start(self, messages: list[Message], options: ChatOptions) -> Generation:
        generation = self.engine.chat(messages, stream=True, **options)
        self.reading, generation.progress = "", self._note_reading
        self.stop.watch(generation)
        return generation

    def _note_reading(self, what: str, fraction: float) -> None:
        self.reading = f"{fraction:.0%}"

    def _read(self, generation: Generation, on_chunk: OnChunk) -> None:
        self.running = generation.result
        try:
            for chunk in generation:
                on_chunk(chunk)
        finally:
            self.running = None
        self.plain_per_second = generation.result.stats.plain_per_second or self.plain_per_second

    def last_prompt(self) -> str:
        """The last message of the user. Raises UsageError where there is none."""
        return self.said[self._last_asked()]["content"]

    def before_last_prompt(self) -> list[Message]:
        """The messages that the last answer was given after, without its own."""
        return [*self._opening, *self.said[self.left_out : self._last_asked()]]

    def take_back(self) -> str:
        """Drops the last message of the user with what followed it; returns its text. Raises
        UsageError where there is none."""
        text = self.last_prompt()
        self.said = self.said[: self._last_asked()]
        self.left_out = min(self.left_out, len(self.said))
        return text

    def forget(self) -> None:
        self.said, self.left_out = [], 0

    def take_over(self, messages: list[Message]) -> None:
        """Goes on from these messages, of which the first may be the system's."""
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.said, self.left_out = list(messages), 0
        self.last = None

    def open(self, model: str, report: Report | None) -> None:
        """Goes on with another model. Raises EdgeSpecError and then keeps the present one."""
        self._replace(self._opener(model, exact=self.exact, report=report))
        self.model = model

    def set_exact(self, exact: bool, report: Report | None) -> None:
        """Opens the model again in the other mode, with the drafters of now. Raises as `open`."""
        engine = self._opener(self.model, exact=exact, report=report)
        try:
            if engine.drafter != self.engine.drafter:
                engine.set_drafter(self.engine.drafter)
        except BaseException:
            engine.close()
            raise
        self._replace(engine)
        self.exact = exact

    def _replace(self, engine: Engine) -> None:
        self.engine.close()
        self.engine = engine
        self._sampling = engine.chat_sampling(**self._asked_sampling)
        self.left_out = 0  # its context may hold more
        self.plain_per_second = None

    def _told_sampling(self) -> str:
        source = sampling_source(self.engine.parts.text.sampling, self._asked_sampling)
        return f"{sampling_text(self._sampling)} ({source})"

    @property
    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _until(self, text: str, again: bool) -> list[Message]:
        """Returns what was said before a message, and the message."""
        said = self.said[: self._last_asked()] if again else self.said
        return [*said, {"role": "user", "content": text}]

    def _last_asked(self) -> int:
        """Returns the place in `said` of the last message of the user. Raises UsageError if there
        is none."""
        for index in range(len(self.said) - 1, -1, -1):
            if self.said[index]["role"] == "user":
                return index
        raise UsageError("nothing was asked yet", remedy="Type a message first.")


def _has_content(result: GenerationResult) -> bool:
    return bool(result.text or result.reasoning)


def _message(result: GenerationResult) -> Message:
    thought = {"reasoning_content": result.reasoning} if result.reasoning else {}
    return {"role": "assistant", "content": result.text, **thought}

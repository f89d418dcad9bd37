"""A conversation with one model: what was said, its engine, and how an answer is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec import AnswerOptions, Chunk, Engine, Generation, GenerationResult

Message = dict[str, str]  # "role" and "content"
Report = Callable[[str, float], None]  # what is being done, and how much of it is
OnChunk = Callable[["Chunk"], None]


class Opener(Protocol):
    """Opens a model as the command line's options say."""

    def __call__(self, model: str, *, exact: bool, report: Report | None) -> Engine:
        """report: None shows progress on stderr. Raises EdgeSpecError."""


class Stop:
    """Ends what is running, from any thread, even before its generation exists."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._generation: Generation | None = None
        self.requested = False

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Within the block, `request` ends what is watched; an earlier request is over."""
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


class Conversation:
    """`said` is what user and assistant said; `last` the latest answer, `running` the growing one.

    Its methods are called by one thread at a time; `stop.request` and, during an answer,
    `set_drafter` by any.
    """

    def __init__(
        self,
        opener: Opener,
        model: str,
        exact: bool,
        answering: AnswerOptions,
        system: str | None,
    ) -> None:
        """Raises EdgeSpecError where the model cannot be opened."""
        self.model = model
        self.exact = exact
        self.answering = answering
        self.system = system
        self.said: list[Message] = []
        self.turns: list[dict[str, Any]] = []  # of --json
        self.last: GenerationResult | None = None
        self.running: GenerationResult | None = None
        self.plain_per_second: float | None = None  # as the latest answers measured it
        self.is_plain = False  # Markdown is shown as it was written
        self.stop = Stop()
        self.files: set[Path] = set()  # that hold it, which may be written again
        self._opener = opener
        self.engine = opener(model, exact=exact, report=None)

    def close(self) -> None:
        self.engine.close()

    @property
    def messages(self) -> list[Message]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.said]

    def answer(self, text: str, on_chunk: OnChunk, *, again: bool = False) -> GenerationResult:
        """Adds the message and the answer to it; a stopped answer stays as far as it came.

        again: in place of the last message and its answer. Raises EdgeSpecError and then leaves
        the conversation as it was.
        """
        said = self.said[: self._last_asked()] if again else self.said
        said = [*said, {"role": "user", "content": text}]
        opening = self.messages[: len(self.messages) - len(self.said)]
        result = self.generate([*opening, *said], on_chunk, self.answering)
        self.said = [*said, {"role": "assistant", "content": result.text}]
        self.last = result
        self.turns.append({"prompt": text, **result.to_dict()})
        return result

    def generate(
        self, messages: list[Message], on_chunk: OnChunk, options: AnswerOptions
    ) -> GenerationResult:
        """An answer that the conversation does not keep. Raises EdgeSpecError."""
        generation = self.engine.chat(messages, stream=True, **options)
        self.stop.watch(generation)
        self.running = generation.result
        try:
            for chunk in generation:
                on_chunk(chunk)
        finally:
            self.running = None
        self.plain_per_second = generation.result.stats.plain_per_second or self.plain_per_second
        return generation.result

    def last_prompt(self) -> str:
        """The last message of the user. Raises UsageError where there is none."""
        return self.said[self._last_asked()]["content"]

    def before_last_prompt(self) -> list[Message]:
        """The messages that the last answer was given after, without its own."""
        return self.messages[: len(self.messages) - len(self.said) + self._last_asked()]

    def forget(self) -> None:
        self.said = []

    def take_over(self, messages: list[Message]) -> None:
        """Goes on from these messages, of which the first may be the system's."""
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.said = list(messages)
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
        self.plain_per_second = None

    def _last_asked(self) -> int:
        """Where in `said` the last message of the user is. Raises UsageError without one."""
        for index in range(len(self.said) - 1, -1, -1):
            if self.said[index]["role"] == "user":
                return index
        raise UsageError("nothing was asked yet", remedy="Type a message first.")

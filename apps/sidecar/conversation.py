"""A conversation: one engine in a thread of its own, which does what it is asked in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Lock, Thread
from typing import Any

from edge_spec import Chunk, EdgeSpecError, Engine, FinishReason, Generation
from edge_spec.apps.sidecar.messages import Code, Id, RpcError, chunk_message, failure, result

MAX_QUEUED = 16
Send = Callable[[dict[str, Any]], None]


class Job:
    """Holds what request `id` asks of an engine: `do` gives back its result, or the answer to
    stream.

    `cancel` may be called at any time, from any thread.
    """

    def __init__(self, id: Id, do: Callable[[Engine], Any]) -> None:
        self.id = id
        self.do = do
        self.cancelled = False
        self.produced: dict[str, Any] | None = None  # by an answer, however it ended
        self._generation: Generation | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    def begun(self, generation: Generation) -> None:
        self._generation = generation
        if self.cancelled:  # before there was anything to cancel
            generation.cancel()


class SidecarConversation:
    """open_engine: called in the conversation's thread, when first needed; that thread closes it.
    on_done: called with a job before its response is sent.

    The thread ends with the process at the latest, however long its last round takes.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], send: Send, on_done: Callable[[Job], None]
    ) -> None:
        self.engine: Engine | None = None
        self.last_stats: dict[str, Any] | None = None  # of the answer that ended last
        self.between_rounds = Lock()  # held by whoever uses the engine
        self._open_engine = open_engine
        self._send = send
        self._on_done = on_done
        self._jobs: Queue[Job | None] = Queue(MAX_QUEUED)
        self._thread = Thread(target=self._work, name="edge-spec-conversation", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises RpcError where too many wait already."""
        try:
            self._jobs.put_nowait(job)
        except Full:
            text = f"{MAX_QUEUED} requests of this conversation wait already"
            raise RpcError(Code.BUSY, text) from None

    def end(self, timeout_s: float) -> None:
        """Ends the thread once its jobs are done. Returns after `timeout_s` at the latest."""
        with suppress(Full):
            self._jobs.put(None, timeout=timeout_s)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                response = result(job.id, self._do(job))
            except (EdgeSpecError, RpcError) as error:
                response = failure(job.id, error, job.produced)
            except Exception as error:  # a mistake of ours must not end the other conversations
                traceback.print_exc()
                response = failure(job.id, error)
            self._on_done(job)
            try:
                self._send(response)
            except ValueError as error:  # what JSON cannot hold, such as a note of another's
                self._send(failure(job.id, error))
        if self.engine is not None:
            self.engine.close()

    def _do(self, job: Job) -> Any:
        if job.cancelled:
            raise RpcError(Code.CANCELLED, "cancelled before it began")
        if self.engine is None:
            self.engine = self._open_engine()
        with self.between_rounds:
            outcome = job.do(self.engine)
        if not isinstance(outcome, Generation):
            return outcome
        job.begun(outcome)
        try:
            while (chunk := self._next(outcome)) is not None:
                self._send(chunk_message(job.id, chunk))
        finally:
            job.produced = told = outcome.result.to_dict()
            del told["tokens"]  # they were streamed
            self.last_stats = told["stats"]
        if outcome.result.finish_reason is FinishReason.CANCELLED and not outcome.result.tokens:
            read = f"{outcome.num_read} of {outcome.result.stats.prompt_n}"
            raise RpcError(
                Code.CANCELLED,
                f"cancelled after {read} tokens of the prompt were read; asking again goes on from "
                "there",
            )
        return told

    def _next(self, generation: Generation) -> Chunk | None:
        with self.between_rounds:
            return next(generation, None)

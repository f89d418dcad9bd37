"""Does what each method of the sidecar promises."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from edge_spec import EdgeSpecError, Engine
from edge_spec.apps.sidecar import messages
from edge_spec.apps.sidecar.conversation import Job, Send, SidecarConversation
from edge_spec.apps.sidecar.messages import Code, Id, RpcError, RpcRequest, UnreadableError

CLOSING_S = 2.0  # for rounds in progress; they take as long as they take, but nobody waits longer
MAX_CONVERSATIONS = 4


class Sidecar:
    """Answers requests on an engine, which it closes. Call it from one thread.

    The first conversation uses the engine itself, others are forks of it. Beyond
    MAX_CONVERSATIONS, the idle one that was used longest ago is closed; never the first.
    """

    def __init__(self, engine: Engine, send: Send) -> None:
        self._origin = engine
        self._send = send
        self._jobs: dict[Id, tuple[SidecarConversation, Job]] = {}  # those not answered yet
        self._first = self._conversation(lambda: engine)
        self._conversations: dict[str, SidecarConversation] = {}  # used longest ago first
        self._shut = False
        self._methods: dict[str, Callable[[RpcRequest], Any]] = {
            "initialize": self._initialize,
            "chat": self._chat,
            "generate": self._generate,
            "cancel": self._cancel,
            "set_drafter": self._set_drafter,
            "snapshot": self._snapshot,
            "restore": self._restore,
            "stats": self._stats,
            "shutdown": self._shutdown,
        }

    def handle(self, line: bytes) -> bool:
        """Answers at once or lets a conversation answer; False where `exit` was asked for."""
        id: Id | None = None
        try:
            request = RpcRequest.parse(line)
            id = request.id
            if request.method == "exit":
                return False
            if request.method not in self._methods:
                raise RpcError(Code.UNKNOWN_METHOD, f"there is no method {request.method!r}")
            if self._shut:
                raise RpcError(Code.INVALID_REQUEST, "after shutdown there is only exit")
            value = self._methods[request.method](request)
        except UnreadableError as error:
            self._send(messages.failure(error.id, error))
        except (RpcError, EdgeSpecError) as error:
            self._fail(id, error)
        except Exception as error:
            traceback.print_exc()
            self._fail(id, error)
        else:
            if id is not None and not isinstance(value, Job):
                self._send(messages.result(id, value))
        return True

    def close(self) -> None:
        """Cancels what runs and frees the models; ends within about CLOSING_S."""
        ends_at = time.monotonic() + CLOSING_S
        for _, job in list(self._jobs.values()):
            job.cancel()
        everyone = {self._first, *self._conversations.values()}
        for conversation in everyone:
            conversation.end(max(0.0, ends_at - time.monotonic()))
        for conversation in everyone:
            conversation.join(max(0.0, ends_at - time.monotonic()))
        if self._first.engine is None:  # nobody has asked it
            self._origin.close()
        self._conversations.clear()
        self._shut = True

    def _fail(self, id: Id | None, error: Exception) -> None:
        if id is not None:
            self._send(messages.failure(id, error))
        else:
            print(f"edge-spec: in a notification: {error}", file=sys.stderr)

    def _initialize(self, request: RpcRequest) -> dict[str, Any]:
        request.read(messages.Initialize)
        engine = self._origin
        return {
            "protocol": messages.PROTOCOL,
            "version": version("edge-spec"),
            "model": engine.name,
            "runtime": engine.runtime,
            "drafter": engine.drafter,
            "drafters": engine.drafters,
            "context_length": engine.context_length,
            "max_conversations": MAX_CONVERSATIONS,
        }

    def _chat(self, request: RpcRequest) -> Job:
        asked = request.read(messages.ToChat)
        options = asked.options.answer_options()
        if asked.tools:
            options["tools"] = asked.tools
        return self._submit(
            asked, request.id, lambda engine: engine.chat(asked.messages, stream=True, **options)
        )

    def _generate(self, request: RpcRequest) -> Job:
        asked = request.read(messages.ToGenerate)
        options = asked.options.answer_options()
        return self._submit(
            asked, request.id, lambda engine: engine.generate(asked.prompt, stream=True, **options)
        )

    def _snapshot(self, request: RpcRequest) -> Job:
        asked = request.read(messages.ToSnapshot)
        return self._submit(
            asked, request.id, lambda engine: engine.snapshot(asked.path, asked.note)
        )

    def _restore(self, request: RpcRequest) -> Job:
        asked = request.read(messages.ToRestore)
        return self._submit(asked, request.id, lambda engine: {"note": engine.restore(asked.path)})

    def _set_drafter(self, request: RpcRequest) -> Job | dict[str, str]:
        """Takes effect at once, even within an answer; a conversation that is new does it first."""
        asked = request.read(messages.ToSetDrafter)

        def choose(engine: Engine) -> dict[str, str]:
            engine.set_drafter(asked.drafter)
            return {"drafter": engine.drafter}

        engine = self._named(asked.conversation).engine
        return self._submit(asked, request.id, choose) if engine is None else choose(engine)

    def _cancel(self, request: RpcRequest) -> dict[str, bool]:
        asked = request.read(messages.ToCancel)
        _, job = self._jobs.get(asked.id, (None, None))
        if job is not None:
            job.cancel()
        return {"cancelled": job is not None}

    def _stats(self, request: RpcRequest) -> dict[str, Any]:
        request.read(messages.Nothing)
        jobs = list(self._jobs.values())
        return {
            "conversations": {
                name: {
                    "drafter": (conversation.engine or self._origin).drafter,
                    "requests": [job.id for owner, job in jobs if owner is conversation],
                    "last": conversation.last_stats,
                }
                for name, conversation in self._conversations.items()
            }
        }

    def _shutdown(self, request: RpcRequest) -> None:
        request.read(messages.Nothing)
        self.close()

    def _submit(
        self, asked: messages.OfConversation, id: Id | None, do: Callable[[Engine], Any]
    ) -> Job:
        if id is None:
            raise RpcError(Code.INVALID_REQUEST, "this method needs an id to answer to")
        if id in self._jobs:
            raise RpcError(Code.INVALID_REQUEST, f"request {id!r} is not answered yet")
        conversation, job = self._named(asked.conversation), Job(id, do)
        self._jobs[id] = conversation, job
        try:
            conversation.submit(job)
        except RpcError:
            del self._jobs[id]
            raise
        return job

    def _named(self, name: str) -> SidecarConversation:
        """Raises RpcError where there is no room for one more."""
        found = self._conversations.pop(name, None)
        if found is None and not self._conversations:
            found = self._first
        if found is None:
            if len(self._conversations) >= MAX_CONVERSATIONS:
                self._close_an_idle_one()
            found = self._conversation(self._fork)
        self._conversations[name] = found
        return found

    def _close_an_idle_one(self) -> None:
        busy = {conversation for conversation, _ in list(self._jobs.values())}
        for name, conversation in self._conversations.items():
            if conversation is not self._first and conversation not in busy:
                conversation.end(CLOSING_S)
                conversation.join(CLOSING_S)
                del self._conversations[name]
                return
        raise RpcError(Code.BUSY, f"{MAX_CONVERSATIONS} conversations are answering already")

    def _conversation(self, open_engine: Callable[[], Engine]) -> SidecarConversation:
        return SidecarConversation(open_engine, self._send, self._done)

    def _done(self, job: Job) -> None:
        del self._jobs[job.id]

    def _fork(self) -> Engine:
        with self._first.between_rounds:
            return self._origin.fork()

"""A model that is open: its engine, and what answers requests with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from threading import Thread
from typing import Any

from edge_spec import Engine, SamplingParams
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.slots import Pool, Slot
from edge_spec.apps.server.work import Desk
from edge_spec.core.recommended_sampling import sampling_source, sampling_text


@dataclass(frozen=True)
class Description:
    """The description of a model once it was open, also when it is closed again."""

    info: Mapping[str, Any]
    props: Mapping[str, Any]


class OpenModel:
    """Slot 0 is the engine itself, the others are its forks. `close` closes them, and the engine
    where it is owned; else it drafts as before, whatever requests asked for."""

    def __init__(
        self, name: str, engine: Engine, options: ServerOptions, *, is_owned: bool
    ) -> None:
        """Raises an EdgeSpecError where the slots cannot be had, and then closes the engine where
        it is owned."""
        with ExitStack() as opened:  # closes what is open already where the rest fails
            if is_owned:
                opened.callback(engine.close)
            else:
                opened.callback(_restore, engine, engine.drafter)
            forks = [opened.enter_context(engine.fork()) for _ in range(options.parallel - 1)]
            slots = [Slot(each) for each in (engine, *forks)]
            for slot in slots:
                opened.callback(slot.thread.shutdown)
            self.pool = Pool(slots, options.queue, options.queue_timeout_s)
            self.desk = Desk(name, engine, options)
            self.description = _description(self.desk, engine, options)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()


class Loading:
    """A model that is being opened in a thread of its own, which ends with the process at the
    latest."""

    def __init__(self, open: Callable[[], OpenModel]) -> None:
        self._open = open
        self._result: Future[OpenModel] = Future()
        self._result.set_running_or_notify_cancel()  # whoever waits may end, the thread goes on
        self._thread = Thread(target=self._run, name="opening", daemon=True)
        self._thread.start()

    async def result(self) -> OpenModel:
        """Raises what `open` raises."""
        return await asyncio.wrap_future(self._result)

    def discard(self, timeout_s: float) -> None:
        """Closes what is opened as soon as it is; waits for that as long as this."""
        self._result.add_done_callback(_close_opened)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._result.set_result(self._open())
        except BaseException as error:  # told to whoever waits, whatever it is
            self._result.set_exception(error)


def _close_opened(result: Future[OpenModel]) -> None:
    if result.exception() is None:
        result.result().close()


def _restore(engine: Engine, drafter: str) -> None:
    if engine.drafter != drafter:
        engine.set_drafter(drafter)


def _description(desk: Desk, engine: Engine, options: ServerOptions) -> Description:
    info = {
        "model": desk.model,
        "runtime": engine.runtime,
        "drafter": desk.drafter,
        "drafters": ["auto", "none", *engine.drafters],
        "context_length": engine.context_length,
        "version": version("edge-spec"),
    }
    return Description(info, props_document(desk.model, engine, options))


def props_document(name: str, engine: Engine, options: ServerOptions) -> dict[str, Any]:
    """Describes how the page has its conversations answered, and what requests get
    that do not say."""
    asked, text = options.asked_sampling, engine.parts.text
    of_page = engine.chat_sampling(**asked)
    return {
        "default_generation_settings": {
            "n_ctx": engine.context_length,
            "params": _params(of_page, options),
        },
        "total_slots": options.parallel,
        "model_alias": name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": text.chat_template or "",
        "bos_token": "" if text.bos_id is None else text.tokenizer.token_text(text.bos_id),
        "eos_token": text.tokenizer.token_text(text.eos_ids[0]) if text.eos_ids else "",
        "build_info": f"edge-spec {version('edge-spec')}",
        "edge_spec": {
            "sampling": sampling_text(of_page),
            "sampling_source": sampling_source(engine.parts.text.sampling, asked),
            "request_params": _params(options.sampling, options),
        },
    }


def _params(sampling: SamplingParams, options: ServerOptions) -> dict[str, float]:
    """n_predict: -1 is to the end of the context."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "n_predict": -1 if options.max_tokens is None else options.max_tokens,
    }

"""The composition root: text in, stream of text out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, overload

from edge_spec.core.metrics import PlainRate
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.session_errors import close_quietly, translate_errors
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.components import AnswerRecorder, EngineComponents, SharedModels
from edge_spec.engine.conversation import Conversation
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.drafter_switch import DrafterSwitch
from edge_spec.engine.generation import Generation
from edge_spec.engine.request import AnswerOptions, ChatOptions, context_length_of, request_of
from edge_spec.engine.results import GenerationResult
from edge_spec.engine.snapshot import check_snapshot, take_over, take_snapshot
from edge_spec.engine.snapshot_file import read_snapshot, write_snapshot
from edge_spec.errors import UsageError
from edge_spec.text.chat_template import PromptOptions
from edge_spec.text.infill import InfillPrompt, room_beside
from edge_spec.text.parts.answer_form import Reasoning
from edge_spec.text.plain_messages import Message, Tools

_log = logging.getLogger(__name__)


class Engine:
    """One model with its drafters and one KV cache. Use it from one thread at a time, but for
    `set_drafter`, `chat_prompt` and `encode`, which any thread may call; `fork` makes another one
    for another thread.

    Prompts that begin like the text before them reuse its part of the cache, so a conversation
    is continued by passing all of its messages. Starting a generation ends the one before it.
    """

    def __init__(self, parts: EngineComponents, models: SharedModels | None = None) -> None:
        """models: those of `parts`, where other engines use them too."""
        self.parts = parts
        self.last: GenerationResult | None = None
        drafts = [draft.model for draft in parts.drafts]
        self._models = models or SharedModels([parts.model, *drafts], parts.batch, parts.learner)
        self._session = parts.model.open_session()
        self._learning = None if parts.learner is None else AnswerRecorder(parts.learner)
        self._drafting = DrafterSwitch(parts, self._session, self._learning)
        self._conversation = Conversation(
            self._drafting.decoder(),
            PlainRate(parts.min_rows),
            parts.prompts,
            keeps_places=parts.model.capabilities.rollback_rows is not None,
        )
        self._running: Generation | None = None
        self._answering = False
        self._closed = False
        self._models.acquire()
        parts.prompts.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the caches, and the models where no other engine uses them; answering afterwards
        raises UsageError."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # is done, last one first, whatever is raised before
            rest.callback(self._models.release)
            rest.callback(self.parts.prompts.leave)
            for draft in self.parts.drafts:
                rest.callback(draft.close_session)
            rest.callback(close_quietly, self._session)
            rest.callback(self._keep_learnt)
            rest.callback(self._drafting.close)
            rest.callback(self._conversation.put_away)
            self._end_running()

    def _keep_learnt(self) -> None:
        learnt = self._drafting.stats()
        if self.parts.keep_learnt is not None and self.last is not None and learnt:
            self.parts.keep_learnt(learnt)

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: bool = False,
        tools: Tools = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        reasoning: Reasoning | None = None,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """Returns the assistant's next message; a string is one message of the user. With `stream`,
        returns what is iterated for it piece by piece.

        options: `ChatOptions`; tools that the chat template does not know are described in a
        message of the system. template_kwargs: what else the template is given.
        continue_final_message: the answer goes on with the last message. reasoning: "auto", the
        model thinks before it answers if it does so by itself; "off", it does not; a number, it
        does, for so many tokens at most. Raises UsageError for malformed messages, tools or
        options, ContextFullError if the messages do not fit.
        """
        asked: PromptOptions = {
            "template_kwargs": template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "reasoning": reasoning,
        }
        prompt = self.chat_prompt(messages, tools, **asked)
        if "form" not in options:
            options["form"] = self.parts.text.answer_form(prompt, tools, **asked)
        generation = self._start(prompt, **options)
        return generation if stream else generation.finish()

    def stream(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> Generation:
        """Answers as `chat` does, piece by piece: iterate for `Chunk`s."""
        return self.chat(messages, stream=True, **options)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> Generation: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """Continues a text, or token ids, without a chat template.

        options: `AnswerOptions`. Raises UsageError for an empty prompt or malformed options,
        ContextFullError if the prompt does not fit.
        """
        if hasattr(prompt, "tolist"):  # an array's
            prompt = prompt.tolist()
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        generation = self._start(ids, **options)
        return generation if stream else generation.finish()

    def infill_prompt(
        self,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        max_tokens: int | None = None,
        names_file: bool = False,
        suffix_first: bool | None = None,
    ) -> InfillPrompt:
        """Returns the tokens that ask `generate` for what stands between two texts, such as those
        around a cursor.

        files: names and texts of other files, the most important last. What does not fit the
        context is left out: of the files first, then the prefix from its beginning and the suffix
        from its end. max_tokens: of the answer, for which room is left. The others: as
        `Infill.prompt` has them. Raises UnsupportedModelError for a model that was not trained for
        it.
        """
        room = room_beside(self.context_length, max_tokens)
        return self.parts.text.infill.prompt(
            prefix, suffix, files, room=room, names_file=names_file, suffix_first=suffix_first
        )

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.parts.name

    @property
    def runtime(self) -> str:
        """The name of the runtime that the model runs on."""
        return self.parts.runtime

    @property
    def plan(self) -> tuple[str, ...]:
        """What runs the model, who drafts, and what would be faster here: at most three lines, each
        with its reason."""
        return () if self.parts.plan is None else self.parts.plan.explain()

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return context_length_of(self.parts)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without a chat template."""
        return self.parts.text.tokenizer.encode(text)

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Returns the tokens that ask for the assistant's next message, or for the rest of the last
        one. options: `PromptOptions`."""
        return self.parts.text.chat_prompt(messages, tools, **options)

    def chat_sampling(self, **asked: float | None) -> SamplingParams:
        """Returns how the model's makers mean answers in a conversation to be drawn, else
        temperature 0.7, top-p 0.95 and min-p 0.05; what is asked for, by the names of
        SamplingParams, goes before each.

        `chat` is greedy all the same unless it is given this. Raises UsageError for a value out of
        its range.
        """
        recommended = self.parts.text.sampling
        if recommended.ignored:
            unused = ", ".join(recommended.ignored)
            _log.warning("%s: of its makers' sampling this is not used: %s", self.name, unused)
        return recommended.with_asked(asked)

    def fork(self) -> Engine:
        """Another conversation on the same weights, which another thread may use at the same time.

        It has caches, drafters and statistics of its own, and begins without a text; its drafters
        are those of this engine now. Each is closed for itself, in any order: the last one closes
        the models. Raises UsageError on a closed engine, DeviceMemoryError where there is too
        little memory for one more cache.
        """
        self._require_open()
        parts = self.parts
        with ExitStack() as opened:  # closes what is open already where the rest fails
            drafts = []
            for draft in parts.drafts:
                drafts.append(draft.fork())
                opened.callback(drafts[-1].close_session)
            speculation_factory = self._drafting.with_head(parts.speculation_factory).forked(drafts)
            speculation = speculation_factory.choose(self.drafter)
            opened.callback(speculation.close)
            parts = replace(
                parts,
                drafts=drafts,
                speculation_factory=speculation_factory,
                speculation=speculation,
            )
            engine = Engine(replace(parts, drafter=self.drafter), self._models)
            opened.pop_all()
        return engine

    @property
    def drafters(self) -> list[str]:
        """The names that `set_drafter` takes one or several of, beside "auto" and "none"."""
        return self._drafting.possible

    @property
    def drafter(self) -> str:
        """The names that `set_drafter` was given last."""
        return self._drafting.names

    @property
    def drafting(self) -> str:
        """The names of who drafts now, where `drafter` may be "auto"."""
        plan = self.parts.plan
        return plan.drafter if plan is not None and self.drafter == "auto" else self.drafter

    def set_drafter(self, names: str) -> None:
        """Has others draft from the next round on, also of an answer that is being written: "auto",
        "none", or drafters' names joined by commas. Any thread may call.

        Raises UsageError for a name that is not installed, UnsupportedModelError for one that this
        model cannot have, and then changes nothing.
        """
        self._require_open()
        self._drafting.offer(names)

    @contextmanager
    def without_drafting(self) -> Iterator[None]:
        """Answers that start within the block are plain; after it, drafters and policy go on with
        what they learnt before it."""
        self._end_running()
        with self._drafting.off():
            yield
            self._end_running()

    @contextmanager
    def verifying_all_draft_tokens(self) -> Iterator[Counter[str]]:
        """Answers that start within the block verify every draft token, whether or not that pays;
        drafters begin again before and after it. Yields what `AlwaysVerifyPolicy` counts."""
        self._end_running()
        with self._drafting.always_verify() as exercised:
            yield exercised
            self._end_running()

    def snapshot(self, path: str | Path, note: Mapping[str, Any] | None = None) -> None:
        """Writes the whole conversation to one file: caches, drafters' state, what was learnt, and
        a note, any JSON object, such as the messages.

        Raises UsageError while an answer is being written, since ending it here would lose the
        rest of it, and for a note that JSON cannot hold; SnapshotError where the file cannot be
        written.
        """
        self._require_open()
        running = self._running
        if self._answering and running is not None and running.result.finish_reason is None:
            raise UsageError(
                "an answer is being written", remedy="Finish or close it before the snapshot."
            )
        self._settle()  # all of a running answer has been handed out
        snapshot = take_snapshot(self.parts, self._conversation, self._drafting, note)
        write_snapshot(Path(path), snapshot)

    def restore(self, path: str | Path) -> dict[str, Any] | None:
        """Takes a snapshot's conversation over, in place of this one, and returns its note.

        A prompt that goes on with it is answered as the engine that made the snapshot would have,
        without reading it again where model, runtime and options are the same; otherwise the text
        is read again now. Drafters stay those of this engine. Ends a running generation.

        Raises SnapshotError for a file that is damaged or of another model, ContextFullError for a
        conversation that does not fit; this one then goes on as if nothing had been asked.
        """
        self._require_open()
        snapshot = read_snapshot(Path(path))
        check_snapshot(snapshot, self.parts, context_length_of(self.parts))
        self._settle()
        self._set_answering(True)
        try:
            take_over(snapshot, self.parts, self._conversation, self._drafting)
        finally:
            self._set_answering(False)
        return snapshot.description.note

    def _settle(self) -> None:
        """Ends the answer that is running; the drafters are then those of the next one."""
        self._end_running()
        self._replace_failed()
        self._drafting.take()
        self._conversation.decoder = self._drafting.decoder()

    def _start(self, prompt: Sequence[int], **options: Unpack[AnswerOptions]) -> Generation:
        self._require_open()
        request = request_of(self.parts, prompt, options)
        self._end_running()
        self._replace_failed()
        if self._learning is not None:
            self._drafting.use_head(self._learning.head())
        self._drafting.take()
        conversation, own = self._conversation, request.drafters
        conversation.decoder = self._drafting.decoder(own)
        request.sampler.tie_margin = conversation.decoder.tie_margin
        self._set_answering(True)
        if self._learning is not None:
            self._learning.begin()
        generation = Generation(
            conversation,
            request,
            self.parts.text.tokenizer,
            on_end=partial(self._on_end, prompt),
            changed_decoder=partial(self._changed_decoder, own),
            round_times=self.parts.round_times,
        )
        stats, lossless = generation.result.stats, self.parts.speculation_factory.lossless
        stats.lossless = str(lossless.promise)
        stats.plain_width, stats.plain_cost = lossless.plain_width, lossless.plain_cost
        stats.kernels = self.parts.model.capabilities.kernels
        self._running, self.last = generation, generation.result
        return generation

    def _replace_failed(self) -> None:
        """Gives the next answer a new session after the target has failed: what its cache holds is
        not known. Raises an EdgeSpecError where none can be opened; the next call tries again."""
        if not self._conversation.failed:
            return
        self._conversation.tokens = []
        close_quietly(self._session)
        with translate_errors:
            self._session = self.parts.model.open_session()
        self._drafting.move_to(self._session)
        self._conversation.failed = False

    def _changed_decoder(self, own: Sequence[Drafter]) -> Decoder | None:
        """Returns the decoder of drafters that were chosen since the last round, if any were."""
        return self._drafting.decoder(own) if self._drafting.take() else None

    def _on_end(self, prompt: Sequence[int]) -> None:
        self._set_answering(False)
        assert self.last is not None
        if self._learning is not None:
            self._learning.end(prompt, self.last)
        if self.parts.round_times is not None:
            stats = self.last.stats
            self.parts.round_times.end(stats.prompt_n + stats.predicted_n)

    def _set_answering(self, answering: bool) -> None:
        learner = self.parts.learner
        if learner is not None and answering != self._answering:
            (learner.pause if answering else learner.resume)()
        self._answering = answering

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed", remedy="Load the model again.")

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
            self._set_answering(False)  # one that never began does not tell its end

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
    """One model with its drafters and one KV cache.

    Use it from one thread at a time; only `set_drafter`, `chat_prompt` and `encode` are
    thread-safe. `fork` makes another engine for another thread. A prompt that begins like the text
    before it reuses that part of the cache, so continue a conversation by passing all of its
    messages. Starting a generation ends the one before it.
    """

    def __init__(self, parts: EngineComponents, models: SharedModels | None = None) -> None:
        """models: those of `parts`, if other engines use them too."""
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
        """Free the caches, and the models unless another engine uses them.

        Answering afterwards raises UsageError.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # run in reverse order, whatever is raised before
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
        if self.parts.round_times is not None:
            self.parts.round_times.keep()
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
        """Return the assistant's next message, or with `stream` an iterator over its pieces.

        messages: a string is one user message.
        options: `ChatOptions`; a system message describes tools that the chat template cannot.
        template_kwargs: further arguments for the template.
        continue_final_message: the answer continues the last message.
        reasoning: "auto": think before answering if the model does so by itself; "off": do not; a
        number: think for at most that many tokens.
        Raises UsageError for malformed messages, tools or options, ContextFullError if the messages
        do not fit.
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
        """Answer as `chat` does, piece by piece: iterate for `Chunk`s."""
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
        """Continue a text, or token ids, without a chat template.

        options: `AnswerOptions`.
        Raises UsageError for an empty prompt or malformed options, ContextFullError if the prompt
        does not fit.
        """
        if hasattr(prompt, "tolist"):  # an array
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
        """Return the tokens that ask `generate` for the text between two others, as at a cursor.

        files: names and texts of other files, the most important last. If the context is too short,
        files are shortened first, then the prefix from its beginning and the suffix from its end.
        max_tokens: of the answer, for which room is left.
        names_file, suffix_first: as in `Infill.prompt`.
        Raises UnsupportedModelError for a model that was not trained for it.
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
        """What runs the model, what drafts and what would be faster: up to three lines, with
        reasons.
        """
        return () if self.parts.plan is None else self.parts.plan.explain()

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return context_length_of(self.parts)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a chat template."""
        return self.parts.text.tokenizer.encode(text)

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Return the tokens that ask for the assistant's next message or continue the last one.

        options: `PromptOptions`.
        """
        return self.parts.text.chat_prompt(messages, tools, **options)

    def chat_sampling(self, **asked: float | None) -> SamplingParams:
        """Return the sampling that the model's makers recommend for conversations.

        The default is temperature 0.7, top-p 0.95 and min-p 0.05.

        asked: values that override these, by the names of SamplingParams.
        `chat` is greedy unless it is given this. Raises UsageError for a value out of range.
        """
        recommended = self.parts.text.sampling
        if recommended.ignored:
            unused = ", ".join(recommended.ignored)
            _log.warning("%s: of its makers' sampling this is not used: %s", self.name, unused)
        return recommended.with_asked(asked)

    def fork(self) -> Engine:
        """Return an engine for another conversation on the same weights, for use in another thread.

        It has its own caches, drafters and statistics, the drafters chosen here now, and no text.
        Close each engine, in any order; the last one closes the models. Raises UsageError on a
        closed engine, DeviceMemoryError if memory is too short for another cache.
        """
        self._require_open()
        parts = self.parts
        with ExitStack() as opened:  # closes what is open if the rest fails
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
        """Names that `set_drafter` accepts, besides "auto" and "none"."""
        return self._drafting.possible

    @property
    def drafter(self) -> str:
        """The names last given to `set_drafter`."""
        return self._drafting.names

    @property
    def drafting(self) -> str:
        """The names of the current drafters, also if `drafter` is "auto"."""
        plan = self.parts.plan
        return plan.drafter if plan is not None and self.drafter == "auto" else self.drafter

    def set_drafter(self, names: str) -> None:
        """Change drafters from the next round on, also in an answer being written. Thread-safe.

        names: "auto", "none", or drafters' names joined by commas. Raises UsageError for a name
        that is not installed, UnsupportedModelError for one that this model cannot have; both
        change nothing.
        """
        self._require_open()
        self._drafting.offer(names)

    @contextmanager
    def without_drafting(self) -> Iterator[None]:
        """Decode plainly within the block; drafters and policy then continue with what they
        learnt.
        """
        self._end_running()
        with self._drafting.off():
            yield
            self._end_running()

    @contextmanager
    def verifying_all_draft_tokens(self) -> Iterator[Counter[str]]:
        """Verify every draft token within the block, whether or not it pays.

        Drafters start afresh before and after it. Yields what `AlwaysVerifyPolicy` counts.
        """
        self._end_running()
        with self._drafting.always_verify() as exercised:
            yield exercised
            self._end_running()

    def snapshot(self, path: str | Path, note: Mapping[str, Any] | None = None) -> None:
        """Write the whole conversation to one file: caches, drafters' state, what was learnt, and a
        note.

        note: any JSON object, such as the messages. Raises UsageError while an answer is being
        written, which would lose its rest, and for a note that JSON cannot hold; SnapshotError if
        the file cannot be written.
        """
        self._require_open()
        running = self._running
        if self._answering and running is not None and running.result.finish_reason is None:
            raise UsageError(
                "an answer is being written", remedy="Finish or close it before the snapshot."
            )
        self._settle()  # a running answer was handed out in full
        snapshot = take_snapshot(self.parts, self._conversation, self._drafting, note)
        write_snapshot(Path(path), snapshot)

    def restore(self, path: str | Path) -> dict[str, Any] | None:
        """Replace this conversation by a snapshot's, and return its note.

        A prompt that continues it is answered as by the engine that made the snapshot, without
        reading it again if model, runtime and options are the same; otherwise the text is read
        again now. Keeps this engine's drafters and ends a running generation. Raises SnapshotError
        for a file that is damaged or of another model, ContextFullError for a conversation that
        does not fit; this conversation then continues unchanged.
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
        """End a running answer and take up the next one's drafters."""
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
        """Open a new session after the target failed: its cache is in an unknown state.

        Raises an EdgeSpecError if none can be opened; the next call tries again.
        """
        if not self._conversation.failed:
            return
        self._conversation.tokens = []
        close_quietly(self._session)
        with translate_errors:
            self._session = self.parts.model.open_session()
        self._drafting.move_to(self._session)
        self._conversation.failed = False

    def _changed_decoder(self, own: Sequence[Drafter]) -> Decoder | None:
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
            self._set_answering(False)  # it may not have begun

"""The composition root: text in, stream of text out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack, overload

from edge_spec.decoder import Decoder, Limits
from edge_spec.drafters.protocol import Attached, CountingText, TextCounts
from edge_spec.errors import ContextFullError, UsageError
from edge_spec.generation import Conversation, Generation, Request
from edge_spec.metrics import PlainRate, Stats
from edge_spec.parts import Parts
from edge_spec.plugins import PAIR_DRAFTERS
from edge_spec.results import GenerationResult
from edge_spec.sampling import Sampler, SamplingParams
from edge_spec.shared import SharedModels
from edge_spec.snapshot import check_snapshot, take_over, take_snapshot
from edge_spec.snapshot_file import read_snapshot, write_snapshot
from edge_spec.speculation import Speculation
from edge_spec.template import Message

GREEDY = SamplingParams()


class AnswerOptions(TypedDict, total=False):
    """How `chat` and `generate` answer."""

    max_tokens: int | None  # None: until the model ends its text or the context is full
    stop: str | Sequence[str]  # the text ends before the first of these
    sampling: SamplingParams  # greedy where not given
    domain: str  # of text, such as "code": what a draft is accepted in is counted for each


class Engine:
    """One model with its drafters and one KV cache. Use it from one thread at a time; `fork` makes
    another one for another thread.

    Prompts that begin like the text before them reuse its part of the cache, so a conversation
    is continued by passing all of its messages. Starting a generation ends the one before it.
    """

    def __init__(self, parts: Parts, models: SharedModels | None = None) -> None:
        """models: those of `parts`, where other engines use them too."""
        self.parts = parts
        self.last: GenerationResult | None = None
        drafts = [draft.model for draft in parts.drafts]
        self._models = models or SharedModels([parts.model, *drafts])
        self._drafter = parts.drafter
        self._session = parts.model.open_session()
        self._speculation = parts.speculation
        self._learnt: dict[str, list[float]] = {}  # by drafters that were used before
        self._attach(parts.speculation)
        load = parts.speculator.load
        self._conversation = Conversation(self._decoder(), PlainRate(), load)
        self._running: Generation | None = None
        self._answering = False
        self._closed = False
        self._models.take()

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
        self._end_running()
        if self.parts.idle_work is not None:
            self.parts.idle_work.close()
        self._speculation.close()
        if self.parts.history is not None:
            self.parts.history.save()
        learnt = self._learnt | self._speculation.learnt()
        if self.parts.keep_learnt is not None and self.last is not None and learnt:
            self.parts.keep_learnt(learnt)
        self._session.close()
        for draft in self.parts.drafts:
            draft.close_session()
        self._models.give_back()

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
            speculator = parts.speculator.forked(drafts)
            speculation = speculator.choose(self._drafter)
            opened.callback(speculation.close)
            parts = replace(parts, drafts=drafts, speculator=speculator, speculation=speculation)
            engine = Engine(replace(parts, drafter=self._drafter), self._models)
            opened.pop_all()
        return engine

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> Generation: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """The assistant's next message; a string is one message of the user.

        Raises UsageError for malformed messages, ContextFullError if they do not fit.
        """
        generation = self._start(self.chat_prompt(messages), **options)
        return generation if stream else generation.finish()

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
        """The continuation of a text, or of token ids, without a chat template.

        Raises UsageError for an empty prompt, ContextFullError if it does not fit.
        """
        ids = self.parts.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        generation = self._start(ids, **options)
        return generation if stream else generation.finish()

    def set_drafter(self, names: str) -> None:
        """From the next answer on: "auto", "none", or drafters' names joined by commas.

        Raises UsageError for a name that is not installed, UnsupportedModelError for one that this
        model cannot have, and then changes nothing.
        """
        speculation = self.parts.speculator.choose(names)
        self._end_running()
        self._attach(speculation)
        self._learnt |= self._speculation.learnt()
        self._speculation.close()
        speculation.relearn(self._learnt)
        self._use(speculation)
        self._drafter = names

    @contextmanager
    def without_drafting(self) -> Iterator[None]:
        """Answers that start within the block are plain; after it, drafters and policy go on with
        what they learnt before it. The block must not call `set_drafter` or `close`."""
        drafting = self._speculation
        self._use(self.parts.speculator.choose("none"))
        try:
            yield
        finally:
            self._use(drafting)

    def chat_prompt(self, messages: str | Sequence[Message]) -> list[int]:
        """The tokens that ask for the assistant's next message."""
        return self.parts.text.chat_prompt(messages)

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
        self._end_running()  # all of it has been handed out
        conversation, speculation = self._conversation, self._speculation
        taken = take_snapshot(self.parts, conversation, speculation, self._learnt, note)
        write_snapshot(Path(path), taken)

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
        check_snapshot(snapshot, self.parts, self._limits(None).context_length)
        self._end_running()
        self._set_answering(True)
        try:
            take_over(snapshot, self.parts, self._conversation, self._speculation)
        finally:
            self._set_answering(False)
        self._learnt |= snapshot.description.learnt
        return snapshot.description.note

    def _start(self, prompt: Sequence[int], **options: Unpack[AnswerOptions]) -> Generation:
        self._require_open()
        sampling = options.get("sampling", GREEDY)
        stop = options.get("stop", ())
        limits = self._limits(options.get("max_tokens"))
        self._check_tokens("the prompt", prompt)
        self._check_tokens("logit_bias", sampling.logit_bias)
        if not prompt:
            raise UsageError("the prompt is empty", remedy="Give it at least one token.")
        if len(prompt) > limits.context_length:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, the context holds {limits.context_length}",
                remedy="Shorten the prompt or begin a new conversation.",
            )
        self._end_running()
        self._set_answering(True)
        generation = Generation(
            self._conversation,
            Request(tuple(prompt), limits, (stop,) if isinstance(stop, str) else tuple(stop)),
            Sampler(
                sampling,
                prompt,
                self._speculation.tie_margin,
                sampled_drafts=False if self.parts.speculator.exact else None,
            ),
            self.parts.text.tokenizer,
            on_end=partial(self._on_end, options.get("domain", "any"), self._text_counts()),
        )
        self._running, self.last = generation, generation.result
        return generation

    def _text_counts(self) -> TextCounts:
        drafters = self._speculation.drafters
        counts = [each.text_counts for each in drafters if isinstance(each, CountingText)]
        return TextCounts(*map(sum, zip(*counts, strict=True))) if counts else TextCounts()

    def _on_end(self, domain: str, before: TextCounts, stats: Stats) -> None:
        self._set_answering(False)
        counts = self._text_counts()
        stats.draft_characters = counts.proposed_characters - before.proposed_characters
        stats.draft_characters_accepted = counts.accepted_characters - before.accepted_characters
        history = self.parts.history
        if history is not None and set(stats.drafters) <= set(PAIR_DRAFTERS):  # not others' guesses
            history.observe(domain, stats)
            stats.staleness = history.staleness(domain)

    def _set_answering(self, answering: bool) -> None:
        work = self.parts.idle_work
        if work is not None and answering != self._answering:
            (work.pause if answering else work.resume)()
        self._answering = answering

    def _use(self, speculation: Speculation) -> None:
        self._end_running()
        if self._speculation.tie_margin > speculation.tie_margin:
            # The cache may hold the noise of rows that plain decoding would not have scored so.
            self._conversation.forget()
        self._speculation = speculation
        self._conversation.decoder = self._decoder()

    def _attach(self, speculation: Speculation) -> None:
        for drafter in speculation.drafters:
            if isinstance(drafter, Attached):
                drafter.attach(self.parts.model, self._session)

    def _decoder(self) -> Decoder:
        speculation = self._speculation
        return Decoder(
            self._session,
            speculation.drafters,
            speculation.policy,
            speculation.overlap,
            speculation.anticipation,
        )

    def _limits(self, max_tokens: int | None) -> Limits:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}", remedy="It has to be 1 or more.")
        model = self.parts.model
        # The last pass, too, has to fit the context with all of its rows.
        context_length = model.config.context_length - self.parts.min_rows + 1
        return Limits(
            max_tokens=context_length if max_tokens is None else max_tokens,
            stop_ids=frozenset(self.parts.text.eos_ids),
            context_length=context_length,
            max_rows=model.capabilities.max_rows,
            min_rows=self.parts.min_rows,
        )

    def _check_tokens(self, where: str, tokens: Iterable[int]) -> None:
        vocab_size = self.parts.model.config.vocab_size
        if not all(0 <= token < vocab_size for token in tokens):
            raise UsageError(
                f"{where} has a token outside the vocabulary",
                remedy=f"Tokens are 0 to {vocab_size - 1}.",
            )

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed", remedy="Load the model again.")

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
            self._set_answering(False)  # one that never began does not tell its end

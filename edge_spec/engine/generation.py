"""One generation: a prompt becomes a stream of text."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Progress
from edge_spec.core.sampling import Sampler
from edge_spec.core.text_codec import TextCodec
from edge_spec.drafters.lookup.suffix import num_appeared
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.answer_text import AnswerText
from edge_spec.engine.conversation import Conversation
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.results import (
    Chunk,
    DecodedToken,
    FinishReason,
    GenerationResult,
    PredictionCounts,
)
from edge_spec.scheduler.row_findings import RoundTimes
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.part import PartKind

LONG_TOKENS = 1024  # unread tokens from which reading shows progress


@dataclass(frozen=True)
class Request:
    """A request for one answer. begins_text: the answer begins a text, whatever the prompt.
    drafters: for this answer only. prediction: the expected tokens."""

    prompt: tuple[int, ...]
    limits: GenerationLimits
    sampler: Sampler
    stops: tuple[str, ...] = ()
    begins_text: bool = False
    form: AnswerForm | None = None  # None: all text
    drafters: Sequence[Drafter] = ()
    prediction: Sequence[int] | None = None


class Generation(Iterator[Chunk]):
    """An answer in progress: iterate for its text, or call `finish`.

    `result` grows with each chunk. `progress`, if set before the first chunk, reports how much of a
    long prompt is read. `cancel` may be called from a signal handler or another thread; it ends the
    generation after the current round, leaving the cache consistent. If the model fails, the
    iterator yields the remaining text, then raises an EdgeSpecError; the session is not used again.
    """

    def __init__(
        self,
        conversation: Conversation,
        request: Request,
        tokenizer: TextCodec,
        on_end: Callable[[], None],
        changed_decoder: Callable[[], Decoder | None],
        round_times: RoundTimes | None = None,
    ) -> None:
        """changed_decoder: called between rounds; returns a decoder to continue with, or None.
        round_times: learns from rounds without other active conversations."""
        sampler = request.sampler
        self.result = GenerationResult(seed=None if sampler.params.greedy else sampler.seed)
        self.progress: Progress | None = None
        self._conversation = conversation
        self._request = request
        self._text = AnswerText(
            self.result,
            tokenizer,
            () if request.begins_text else request.prompt,
            request.stops,
            request.limits.stop_ids,
            request.form,
        )
        self._uncounted: deque[RoundStats] = deque()  # rounds with unsettled tokens
        self._num_counted = 0  # tokens of counted rounds
        self._on_end = on_end
        self._changed_decoder = changed_decoder
        self._round_times = round_times
        self._cancelled = False
        self._started = time.perf_counter()
        self._chunks = self._generate()

    def __next__(self) -> Chunk:
        batch = self._conversation.decoder.batch
        batch.enter()
        try:
            return next(self._chunks)
        finally:
            batch.leave()

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def num_read(self) -> int:
        """Return how many prompt tokens the cache holds."""
        return min(self._conversation.decoder.target.length, len(self._request.prompt))

    @contextmanager
    def cancelled_by_interrupt(self) -> Iterator[None]:
        """Make the first Ctrl-C in the block cancel this generation; a second one raises."""

        def cancel(number: int, frame: FrameType | None) -> None:
            self.cancel()
            signal.signal(signal.SIGINT, signal.default_int_handler)

        previous = signal.signal(signal.SIGINT, cancel)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def close(self) -> None:
        """End the generation; `result` keeps what was generated."""
        self._chunks.close()
        if self.result.finish_reason is None:
            self.result.finish_reason = FinishReason.CANCELLED

    def finish(self) -> GenerationResult:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    def _generate(self) -> Generator[Chunk, None, None]:
        conversation, prompt, stats = self._conversation, self._request.prompt, self.result.stats
        decoded: list[int] = []
        try:
            if not self._prefill():
                return
            with closing(self._rounds(decoded)) as rounds:
                for tokens in rounds:
                    if not stats.ttft_ms:
                        stats.ttft_ms = (time.perf_counter() - self._started) * 1e3
                    chunks = self._text.push(tokens)
                    self._time_thought(chunks)
                    self._count_rounds()
                    yield from chunks
                    if self._text.stopped or self._cancelled:
                        break
            if self._text.stopped:
                self._drop_after_stop()
            yield from self._last_chunk(decoded)
        except Exception:
            conversation.failed = True
            try:
                last = list(self._last_chunk(decoded))
            finally:
                self.result.finish_reason = FinishReason.ERROR
            yield from last
            raise
        finally:
            self._text.finish()
            self._count_last_rounds()
            held = conversation.decoder.target.length
            conversation.tokens = [*prompt, *decoded][:held]
            stats.failed_drafters = tuple(
                drafter.name
                for drafter in conversation.decoder.drafters
                if drafter.idle_reason is PlainReason.DRAFT_FAILED
            )
            stats.policy = conversation.decoder.policy.beliefs()
            stats.plain_per_second = conversation.plain_rate.tokens_per_second
            conversation.end_answer()
            self._count_prediction()
            self._on_end()

    def _prefill(self) -> bool:
        """Read the prompt without its last token; return False if cancelled."""
        with self._conversation.reading(self._request.prompt):
            return self._read()

    def _read(self) -> bool:
        conversation, prompt, stats = self._conversation, self._request.prompt, self.result.stats
        target = conversation.decoder.target
        stats.prompt_n = len(prompt)
        conversation.reuse(prompt)
        conversation.recall(lambda: self._cancelled)
        stats.cached_n = target.length
        is_long = len(prompt) - 1 - target.length > LONG_TOKENS
        with conversation.decoder.preparing(prompt):
            while target.length < len(prompt) - 1:
                if self._cancelled:
                    self.result.finish_reason = FinishReason.CANCELLED
                    return False
                conversation.read(prompt, conversation.next_end(prompt))
                if is_long and self.progress is not None:
                    self.progress("Reading the prompt", target.length / (len(prompt) - 1))
        stats.prompt_ms = (time.perf_counter() - self._started) * 1e3
        return True

    def _time_thought(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.kind is PartKind.REASONING:
                elapsed_ms = (time.perf_counter() - self._started) * 1e3
                self.result.reasoning_ms = elapsed_ms - self.result.stats.prompt_ms

    def _rounds(self, decoded: list[int]) -> Generator[list[DecodedToken], None, None]:
        """Yield each round's tokens and add them to `decoded`, also after a change of decoder."""
        conversation, request = self._conversation, self._request
        while True:
            text = [*request.prompt, *decoded]
            limits = replace(request.limits, max_tokens=request.limits.max_tokens - len(decoded))
            changed = None
            with closing(
                conversation.decoder.decode(text, request.sampler, limits, self._on_round)
            ) as rounds:
                for tokens in rounds:
                    decoded += [token.id for token in tokens]
                    yield tokens
                    changed = self._changed_decoder()
                    if changed is not None:
                        break
            if changed is None or decoded[-1] in limits.stop_ids:
                return
            conversation.decoder = changed
            conversation.noise = max(conversation.noise, changed.tie_margin)
            request.sampler.tie_margin = conversation.noise
            with changed.preparing([*request.prompt, *decoded]):
                pass  # the target already holds the text

    def _drop_after_stop(self) -> None:
        """Drop tokens after the stop string from the cache: plain decoding would not have them."""
        plain = len(self._request.prompt) - 1 + self._text.num_written
        if self._conversation.decoder.target.length > plain:
            self._conversation.cut(plain)

    def _on_round(self, round_stats: RoundStats) -> None:
        self._uncounted.append(round_stats)
        self._conversation.plain_rate.observe(round_stats)
        if self._round_times is not None and self._conversation.decoder.batch.active <= 1:
            self._round_times.observe(round_stats)

    def _count_rounds(self) -> None:
        while self._uncounted:
            num_counted = self._num_counted + self._uncounted[0].num_tokens
            if num_counted > len(self.result.tokens):
                return
            self._num_counted = num_counted
            self.result.stats.observe(self._uncounted.popleft())

    def _count_last_rounds(self) -> None:
        """Count those tokens of the last rounds that are in the answer."""
        stats, num_tokens = self.result.stats, len(self.result.tokens)
        self._count_rounds()
        while self._uncounted:
            counted = self._uncounted.popleft().first_tokens(num_tokens - self._num_counted)
            self._num_counted += counted.num_tokens
            stats.observe(counted)
        if self._text.stopped:
            stats.stop_n = self._text.num_written - num_tokens

    def _count_prediction(self) -> None:
        predicted = self._request.prediction
        if predicted is not None:
            appeared = num_appeared(predicted, [token.id for token in self.result.tokens])
            self.result.prediction = PredictionCounts(appeared, len(predicted) - appeared)

    def _last_chunk(self, decoded: list[int]) -> Iterator[Chunk]:
        """Yield the remaining text and set the finish reason."""
        chunks = self._text.finish()
        self._time_thought(chunks)
        self.result.finish_reason = self._reason(decoded)
        yield from chunks

    def _reason(self, decoded: list[int]) -> FinishReason:
        ended = bool(decoded) and decoded[-1] in self._request.limits.stop_ids
        if self._text.stopped or ended:
            return FinishReason.STOP
        return FinishReason.CANCELLED if self._cancelled else FinishReason.LENGTH

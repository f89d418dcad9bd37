"""Reads messages, streams answers, obeys /commands; in a terminal or through pipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from edge_spec import EdgeSpecError, Engine, SamplingParams

HELP = """\
/reset       forget the conversation
/stats       figures of the last answer
/draft off   answer without speculation; /draft on, or /draft NAME, turns it on again
/help        this list
/quit        leave (also Ctrl-D)
Ctrl-C stops an answer and keeps the conversation. Alt-Enter begins a new line."""


class Chat:
    """A conversation: its messages and, for --json, its results."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, max_tokens: int | None, system: str | None
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)
        self.turns: list[dict[str, Any]] = []

    def answer(self, text: str, show: bool) -> None:
        """Adds the message and the answer to it; a cancelled answer stays as far as it came.

        Raises EdgeSpecError and then leaves the conversation as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        generation = self._engine.chat(
            messages, max_tokens=self._max_tokens, sampling=self._sampling, stream=True
        )
        with generation.cancelled_by_interrupt():
            for chunk in generation:
                if show:
                    print(chunk.text, end="", flush=True)
        if show:
            print()
        self.messages = [*messages, {"role": "assistant", "content": generation.result.text}]
        self.turns.append({"prompt": text, **generation.result.to_dict()})

    def command(self, line: str) -> str:
        """Carries out a line that begins with a slash; what to tell the user."""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name == "/reset":
            self.messages = list(self._opening)
            return "The conversation is forgotten."
        if name == "/stats":
            return self._stats()
        if name == "/draft" and argument:
            names = {"off": "none", "on": "auto"}.get(argument, argument)
            try:
                self._engine.set_drafter(names)
            except EdgeSpecError as error:
                return str(error)
            return f"Speculation: {'off' if names == 'none' else names}."
        return HELP

    def _stats(self) -> str:
        if self._engine.last is None:
            return "No answer yet."
        stats = self._engine.last.stats
        lines = [f"{stats.predicted_per_second:.1f} tokens/s over {stats.predicted_n} tokens"]
        if stats.speedup is not None:
            lines[0] += f", {stats.speedup:.2f}x the plain rounds of this session"
        if stats.acceptance_rate is not None:
            lines.append(
                f"accepted {stats.draft_n_accepted} of {stats.draft_n} guesses "
                f"({stats.acceptance_rate:.0%}), {stats.mean_accepted_length:.2f} tokens a round"
            )
        if stats.draft_characters:
            share = stats.draft_characters_accepted / stats.draft_characters
            lines[-1] += f"; {share:.0%} of their characters"
        if len(stats.drafters) > 1:
            lines += [
                f"  {name}: {counts.draft_n_accepted} of {counts.draft_n}"
                for name, counts in stats.drafters.items()
            ]
        if stats.staleness is not None:
            lines.append(stats.staleness)
        reasons = ", ".join(f"{name} {count}" for name, count in stats.plain_reasons.items())
        if reasons:
            lines.append(f"{stats.plain_rounds} of {stats.rounds} rounds were plain: {reasons}")
        lines.append(
            f"first token after {stats.ttft_ms:.0f} ms; prompt of {stats.prompt_n} tokens, "
            f"{stats.cached_n} of them from the cache"
        )
        return "\n".join(lines)


def run(
    engine: Engine,
    sampling: SamplingParams,
    max_tokens: int | None,
    system: str | None,
    as_json: bool,
) -> None:
    """Talks until /quit or the end of input."""
    chat = Chat(engine, sampling, max_tokens, system)
    terminal = sys.stdin.isatty() and not as_json
    if terminal:
        print(f"{engine.parts.name} on {engine.parts.runtime}. /help lists the commands.")
    for line in _typed_lines() if terminal else sys.stdin:
        text = line.strip()
        if text in ("/quit", "/exit"):
            break
        if text.startswith("/"):
            print(chat.command(text), file=sys.stderr if as_json else sys.stdout)
        elif text:
            try:
                chat.answer(text, show=not as_json)
            except EdgeSpecError as error:
                if not terminal:
                    raise
                print(f"edge-spec: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"turns": chat.turns}, ensure_ascii=False))


def _typed_lines() -> Iterator[str]:
    """Lines from the terminal, edited with prompt_toolkit; Ctrl-C drops the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession("> ", key_bindings=keys)
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return

"""What an engine is composed of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_spec.control.numerics import Numerics
from edge_spec.drafters.draft import Draft
from edge_spec.grammar import GrammarCompiler
from edge_spec.model import Model
from edge_spec.pair_history import PairHistory
from edge_spec.speculation import Speculation, Speculator
from edge_spec.template import ChatTemplate, Message, Tools
from edge_spec.tokenizer import TextCodec


@dataclass(frozen=True)
class TextFormat:
    """What stands between text and tokens for one model."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def chat_prompt(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """The tokens that ask for the assistant's next message; a string is one of the user.

        Raises UsageError for malformed messages, and for tools where the template ignores them.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.encode(self.rendered(messages, tools))

    def rendered(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of these tokens. Raises as `chat_prompt` does."""
        names = [
            "" if token is None else self.tokenizer.token_text(token)
            for token in (self.bos_id, next(iter(self.eos_ids), None))
        ]
        return ChatTemplate(self.chat_template, *names).render(messages, tools)


class IdleWork(Protocol):
    """Work with the model that is done while none of the engines that share it is answering."""

    def pause(self) -> None:
        """An answer begins. Returns when the model is free, at most one pass later."""

    def resume(self) -> None:
        """That answer has ended."""

    def close(self) -> None:
        """Returns when nothing uses the model any more."""


@dataclass(frozen=True)
class Parts:
    """`edge_spec.load` composes them."""

    name: str
    runtime: str
    model: Model
    text: TextFormat
    numerics: Numerics
    speculation: Speculation
    speculator: Speculator  # composes it anew for other drafters
    grammars: GrammarCompiler
    drafter: str = "auto"  # the names that `speculation` was composed by
    min_rows: int = 1  # of a pass; more in exact mode
    drafts: Sequence[Draft] = ()  # further models, where there are any
    history: PairHistory | None = None  # of the first of them
    idle_work: IdleWork | None = None
    keep_learnt: Callable[[Mapping[str, list[float]]], None] | None = None  # for the next session
    identity: str = ""  # changes with the model's files
    computing: str = ""  # changes with whatever may change a bit of the cache

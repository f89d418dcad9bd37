"""The items of an answer, made of its parts while they are written."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from edge_spec import Chunk
from edge_spec.apps.server.sealed_thoughts import sealed
from edge_spec.text.parts.part import PartKind

Fields = dict[str, Any]
_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}


class OutputItem(ABC):
    """One item. Each method tells the events of what it is told.

    index: its place in the output.
    """

    kind: ClassVar[PartKind]

    def __init__(self, index: int) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{secrets.token_hex(16)}"
        self.status = "in_progress"
        self.text = ""
        self._index = index

    @abstractmethod
    def document(self) -> Fields:
        """Returns the item with what is known of it."""

    @abstractmethod
    def opening(self) -> Iterator[Fields]: ...

    @abstractmethod
    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]: ...

    @abstractmethod
    def closing(self) -> Iterator[Fields]: ...

    def end(self, status: str) -> Iterator[Fields]:
        self.status = status
        yield from self.closing()
        yield self._event("output_item.done", item=self.document())

    def _event(self, event: str, /, **fields: Any) -> Fields:
        return {"type": f"response.{event}", "output_index": self._index, **fields}

    def _inner(self, event: str, /, **fields: Any) -> Fields:
        """Makes an event that is about something within the item."""
        return self._event(event, item_id=self.id, **fields)

    def begin(self) -> Iterator[Fields]:
        yield self._event("output_item.added", item=self.document())
        yield from self.opening()


class MessageOutput(OutputItem):
    kind = PartKind.TEXT

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._scores: list[Any] = []
        self._has_part = False

    def document(self) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [self._part()] if self._has_part else [],
        }

    def _part(self) -> Fields:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._scores),
        }

    def opening(self) -> Iterator[Fields]:
        self._has_part = True
        yield self._inner("content_part.added", content_index=0, part=self._part())

    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]:
        self.text += text
        self._scores += scores
        yield self._inner("output_text.delta", content_index=0, delta=text, logprobs=scores)

    def closing(self) -> Iterator[Fields]:
        part = self._part()
        told = {"text": self.text, "logprobs": part["logprobs"]}
        yield self._inner("output_text.done", content_index=0, **told)
        yield self._inner("content_part.done", content_index=0, part=part)


class ThoughtOutput(OutputItem):
    """is_summary: it is told as its own summary. is_sealed: it is told sealed, too."""

    kind = PartKind.REASONING

    def __init__(self, index: int, *, is_summary: bool, is_sealed: bool) -> None:
        super().__init__(index)
        self._is_sealed = is_sealed
        self._has_part = False
        self._member = "summary" if is_summary else "content"
        self._kind = "summary_text" if is_summary else "reasoning_text"
        self._part_name = "reasoning_summary_part" if is_summary else "content_part"
        self._text_name = "reasoning_summary_text" if is_summary else "reasoning_text"
        self._place = {"summary_index" if is_summary else "content_index": 0}

    def document(self) -> Fields:
        item: Fields = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        if self._has_part:
            item[self._member] = [self._part()]
        if self._is_sealed:
            item["encrypted_content"] = sealed(self.text)
        return item

    def _part(self) -> Fields:
        return {"type": self._kind, "text": self.text}

    def opening(self) -> Iterator[Fields]:
        self._has_part = True
        yield self._inner(f"{self._part_name}.added", **self._place, part=self._part())

    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]:
        self.text += text
        yield self._inner(f"{self._text_name}.delta", **self._place, delta=text)

    def closing(self) -> Iterator[Fields]:
        yield self._inner(f"{self._text_name}.done", **self._place, text=self.text)
        yield self._inner(f"{self._part_name}.done", **self._place, part=self._part())


class CallOutput(OutputItem):
    kind = PartKind.CALL

    def __init__(self, index: int, call_id: str, namespace: str | None, name: str) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._name = name
        self._space = {"namespace": namespace} if namespace else {}

    def document(self) -> Fields:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            **self._space,
            "name": self._name,
            "arguments": self.text,
        }

    def opening(self) -> Iterator[Fields]:
        return iter(())

    def piece(self, text: str, scores: list[Any]) -> Iterator[Fields]:
        self.text += text
        yield self._inner("function_call_arguments.delta", delta=text)

    def closing(self) -> Iterator[Fields]:
        told = {"name": self._name, "arguments": self.text}
        yield self._inner("function_call_arguments.done", **told)


class Output:
    """The items of one answer, in the order in which they are written. What is told of them does
    not depend on whether anybody hears the events."""

    def __init__(
        self,
        called: Callable[[str], tuple[str | None, str]],
        *,
        tells_thoughts: bool,
        summarizes: bool,
        seals_thoughts: bool,
    ) -> None:
        """called: the namespace and the own name of a function that the model calls."""
        self._called = called
        self._tells_thoughts = tells_thoughts
        self._summarizes = summarizes
        self._seals_thoughts = seals_thoughts
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._early_scores: list[Any] = []  # of tokens that have no text until now

    def documents(self) -> list[Fields]:
        return [item.document() for item in self._items]

    def push(self, chunk: Chunk, scores: list[Any]) -> Iterator[Fields]:
        """scores: of the tokens of a text, where they are asked for."""
        if chunk.call is not None:
            space, name = self._called(chunk.call.name)
            yield from self._begin(CallOutput(len(self._items), chunk.call.id, space, name))
        is_open = self._open is not None and self._open.kind is chunk.kind
        if chunk.kind is PartKind.REASONING and not self._tells_thoughts:
            return
        if not chunk.text and not is_open:  # the beginning of a character, or space after a call
            self._early_scores += scores
            return
        if not is_open:
            scores, self._early_scores = [*self._early_scores, *scores], []
            yield from self._begin(self._made(chunk.kind))
        if self._open is not None and (chunk.text or scores):
            yield from self._open.piece(chunk.text, scores)

    def finish(self, *, is_complete: bool, is_cut: bool) -> Iterator[Fields]:
        """A complete answer has a message or a call, be the message empty: clients look for one.

        is_cut: it has ended within a call.
        """
        is_thought = self._open is not None and self._open.kind is PartKind.REASONING
        if is_complete and (self._open is None or is_thought):
            yield from self._begin(self._made(PartKind.TEXT))
        is_called = self._open is not None and self._open.kind is PartKind.CALL
        is_whole = not is_cut if is_called else is_complete
        yield from self._end("completed" if is_whole else "incomplete")

    def _made(self, kind: PartKind) -> OutputItem:
        index = len(self._items)
        if kind is PartKind.TEXT:
            return MessageOutput(index)
        return ThoughtOutput(index, is_summary=self._summarizes, is_sealed=self._seals_thoughts)

    def _begin(self, item: OutputItem) -> Iterator[Fields]:
        yield from self._end("completed")
        self._items.append(item)
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is not None:
            yield from self._open.end(status)
        self._open = None

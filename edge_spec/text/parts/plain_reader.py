"""Reads an answer that is nothing but text."""

from __future__ import annotations

from edge_spec.text.parts.part import Part, PartKind


class PlainReader:
    is_cut = False

    def push(self, markup: str) -> list[Part]:
        return [Part(PartKind.TEXT, markup)] if markup else []

    def finish(self) -> list[Part]:
        return []

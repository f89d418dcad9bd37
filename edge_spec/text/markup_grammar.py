"""Grammars whose texts may have special tokens in them.

In our variant of Lark, `@"..."` is a text as a chat template writes it: a special token of the
model in it is that token, which no other text of a grammar spells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from edge_spec.core.text_codec import TextCodec
from edge_spec.text.given_encoding import pattern_of

_MARKUP = re.compile(r'@("(?:[^"\\]|\\.)*")')
# A rule that ends at the first occurrence of a text. Where that is a token, no other text spells
# it, and the rule cannot be one of text alone.
_LAZY = re.compile(r'(\w+)\[lazy\](:.*@".*)')


def with_tokens(source: str, codec: TextCodec, stop_ids: Sequence[int]) -> str:
    """Returns the grammar in llguidance's variant of Lark's syntax. A stop token ends the answer,
    so that it and what follows it in a text are left out."""
    if '@"' not in source:
        return source
    added = codec.added_tokens().items()
    special = {text: token for text, (token, is_special) in added if is_special}
    pattern = pattern_of(special)

    def parts(text: str) -> Iterator[str]:
        place = 0
        for found in pattern.finditer(text):
            if found.start() > place:
                yield json.dumps(text[place : found.start()], ensure_ascii=False)
            place = found.end()
            token = special[found.group()]
            if token in stop_ids:
                return
            yield f"<[{token}]>"
        if place < len(text):
            yield json.dumps(text[place:], ensure_ascii=False)

    def spelled(literal: re.Match[str]) -> str:
        return " ".join(parts(json.loads(literal[1]))) or '""'

    def line(written: str) -> str:
        if "%json" in written:  # a schema may have any text
            return written
        lazy = _LAZY.fullmatch(written)
        if lazy is None:
            return _MARKUP.sub(spelled, written)
        name, body = lazy[1], _MARKUP.sub(spelled, lazy[2])
        text, is_token, rest = body.partition("<[")
        if not is_token:
            return f"{name}[lazy]{body}"
        if '"' not in text:
            return f"{name}{body}"
        # What stands before the token would be taken for a part of the text before it.
        whole = f"{name.upper()}_WHOLE"
        return f"{whole}{text}\n{name}: {whole} {is_token}{rest}"

    return "\n".join(map(line, source.split("\n")))

"""Constrain answers to JSON of a schema, a regular expression or a grammar.

A grammar limits which tokens the target chooses from, whatever was drafted, so constrained text is
as lossless as free text. The llguidance library evaluates grammars.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from edge_spec.core.sampling import Constraint
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import UsageError
from edge_spec.text.control_tokens import PlainText
from edge_spec.text.given_encoding import pattern_of
from edge_spec.text.parts.answer_form import speaks_of_thoughts
from edge_spec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge_spec.text.json_schema import HeldSchema

# The style of Python's json.dumps. Small models fill answers with optional whitespace, which is
# also hard to draft. Without \u, a name has only one spelling, so it cannot repeat in another.
JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


_MAKERS = {"json-schema": "json_schema", "regex": "regex", "lark": "lark", "gbnf": "gbnf"}


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have. It is checked when an answer is requested, which raises
    UsageError if it is malformed or no text fits it."""

    kind: str  # "json-schema", "regex", "lark" or "gbnf"
    source: str
    strict: bool = True  # for a JSON schema

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown kind or a source that is no text."""
        if self.kind not in _MAKERS or not isinstance(self.source, str):
            raise UsageError(
                f"a grammar is {reprlib.repr(self.source)} of the kind {self.kind!r}",
                remedy=f"Write one with Grammar.{', '.join(_MAKERS.values())}.",
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | None = None, *, strict: bool = True) -> Self:
        """JSON that fits a JSON Schema; without a schema, any object.

        strict: refuse keywords that cannot be enforced, instead of ignoring them.
        """
        try:
            source = json.dumps({"type": "object"} if schema is None else schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"the schema is no JSON: {error}",
                remedy='Give a mapping such as {"type": "object"}; pydantic\'s classes make one '
                "with model_json_schema().",
            ) from None
        return cls("json-schema", source, strict)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Parts of a JSON schema that are not enforced: a line each, with keyword and place. Raises
        UsageError like an answer."""
        return self.held().passed_over if self.kind == "json-schema" else ()

    @property
    def is_of_answer(self) -> bool:
        """Whether the form describes the answer alone, without a thought before it."""
        return self.kind == "json-schema" or not speaks_of_thoughts(self.source)

    def held(self) -> HeldSchema:
        """Return the schema as llguidance enforces it."""
        from edge_spec.text.json_schema import held_schema

        return held_schema(self.source, is_strict=self.strict)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The whole answer matches a pattern of Rust's regex crate: no lookaround, no
        backreferences."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        """A context-free grammar in llguidance's variant of Lark's syntax, starting at `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Self:
        """A grammar in llama.cpp's syntax, starting at `root`, or in Lark's, which is detected."""
        return cls("gbnf", text)


class GrammarCompiler:
    """Compiles constraints for one model's answers. Any thread may call."""

    def __init__(self, codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._tokenizer: Any = None  # takes a third of a second
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> Constraint:
        """Raises UsageError for a malformed or unsatisfiable grammar and a model without end
        tokens, MissingDependencyError without llguidance."""
        if not self._stop_ids:
            raise UsageError(
                "the model has no end of text, which an answer of a given form ends in",
                remedy="Use a model whose files state an eos_token_id, or ask without a form.",
            )
        from edge_spec.text.json_schema import open_llguidance

        LLMatcher = open_llguidance().LLMatcher  # noqa: N806
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _open_tokenizer(self._codec, self._vocab_size, self._stop_ids)
        try:
            if grammar.kind == "json-schema":
                schema = json.dumps(grammar.held().schema)
                source = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
            elif grammar.kind == "regex":
                source = LLMatcher.grammar_from_regex(grammar.source)
            else:
                text = _as_lark(grammar.source) if grammar.kind == "gbnf" else grammar.source
                text = _with_tokens(text, self._codec, self._stop_ids)
                source = LLMatcher.grammar_from_lark(text)
            matcher = LLMatcher(self._tokenizer, source, log_level=0)
            fault = matcher.get_error()
        except ValueError as error:
            fault = str(error)
        if fault:
            raise UsageError(
                f"no answer can have this form ({grammar.kind}): {' '.join(fault.split())[:300]}",
                remedy="Correct the schema, pattern or grammar.",
            )
        return MatcherConstraint(matcher, self._vocab_size, self._stop_ids)


class MatcherConstraint:
    """An llguidance matcher that advances along draft tokens and rolls back. Stop tokens are
    allowed where the text may end; the matcher does not consume them."""

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        self._fill = fill_next_token_bitmask
        self._matcher = matcher
        self._path: list[int] = []  # consumed beyond the output
        self._bits = np.zeros((1, (vocab_size + 31) // 32), np.int32)
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        if self._read(path) < len(path):
            return np.ones(self._vocab_size, np.bool_)
        if self._matcher.is_stopped():
            self._require_sound()
            allowed = np.zeros(self._vocab_size, np.bool_)
        else:
            self._fill(self._matcher, self._bits)
            self._require_sound()
            bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
            allowed = bits[: self._vocab_size].view(np.bool_)
        allowed[self._stop_ids] = self._matcher.is_accepting()
        return allowed

    def num_allowed(self, tokens: Sequence[int]) -> int:
        self._read(())
        text = self._before_stop(tokens)
        count = int(self._matcher.validate_tokens(text))
        if count < len(text) or count == len(tokens):
            return count
        self._read(text)
        return count + bool(self._matcher.is_accepting())

    def forced(self) -> list[int]:
        self._read(())
        return list(self._matcher.compute_ff_tokens())

    def observe(self, tokens: Sequence[int]) -> None:
        text = self._before_stop(tokens)
        if self._read(text) < len(text):
            self._require_sound()
            raise UsageError(
                "the answer left the form it was to have",
                remedy="Simplify the schema, pattern or grammar.",
            )
        self._path = []

    def _before_stop(self, tokens: Sequence[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        return list(tokens[:end])

    def _read(self, path: Sequence[int]) -> int:
        """Move the matcher along `path`; return how many tokens fit."""
        shared = 0
        for old, new in zip(self._path, path, strict=False):
            if old != new:
                break
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        more = list(path[shared:])
        more = more[: self._matcher.validate_tokens(more)] if more else more
        self._matcher.consume_tokens(more)
        self._path = [*path[:shared], *more]
        return len(self._path)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                f"the answer's form cannot be followed any further: {self._matcher.get_error()}",
                remedy="Simplify the schema, pattern or grammar.",
            )


def _open_tokenizer(codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> Any:
    """Return an LLTokenizer. Answers spell the text of a special token in a form, such as a word to
    choose, with ordinary tokens, as messages do."""
    from llguidance import LLTokenizer, TokenizerWrapper

    codec = codec.without_edges() if isinstance(codec, Tokenizer) else codec
    added = codec.added_tokens().items()
    texts = {token: text.encode() for text, (token, is_special) in added if not is_special}
    pieces = [texts.get(token) or codec.piece(token) for token in range(vocab_size)]
    source = _Pieces(pieces, PlainText(codec, ()).following, stop_ids)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size, eos_token=list(stop_ids))


class _Pieces:
    """The interface that llguidance's TokenizerWrapper expects."""

    def __init__(
        self, pieces: Sequence[bytes], encode: Callable[[str], list[int]], stop_ids: Sequence[int]
    ) -> None:
        self._encode = encode
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        # Each gets a text of its own: equal texts would be interchangeable.
        self.tokens = [piece or f"<|{token}|>".encode() for token, piece in enumerate(pieces)]
        self.eos_token_id = stop_ids[0]
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode()))


_MARKUP = re.compile(r'@("(?:[^"\\]|\\.)*")')
# A rule that ends at the first occurrence of a text. If that is a special token, no other text
# spells it, and the rule cannot be a terminal.
_LAZY = re.compile(r'(\w+)\[lazy\](:.*@".*)')


def _with_tokens(source: str, codec: TextCodec, stop_ids: Sequence[int]) -> str:
    """Replace `@"..."`, our extension of llguidance's Lark syntax: text as a chat template writes
    it, in which special tokens match as tokens. A stop token ends the answer, so it and what
    follows are dropped."""
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
        if "%json" in written:  # a schema may contain any text
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
        # Otherwise the text before the token would be merged with the text before that.
        whole = f"{name.upper()}_WHOLE"
        return f"{whole}{text}\n{name}: {whole} {is_token}{rest}"

    return "\n".join(map(line, source.split("\n")))


_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_ESCAPES = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
# Matches a string, a character class, a comment, or a rule named `start`, which Lark uses for
# `root`.
_START = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*|(?<![\w-])(start)(?![\w-])')


def _as_lark(gbnf: str) -> str:
    """Convert a llama.cpp grammar to llguidance's Lark syntax; return Lark as is. Raises
    ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(gbnf):
        return gbnf
    try:
        lark: str = gbnf_to_lark(_START.sub(_renamed, _ESCAPES.sub(_spelled, gbnf)))
        return lark
    except Exception as error:  # the parser raises anything for an invalid grammar
        raise ValueError(str(error) or type(error).__name__) from None


def _spelled(escape: re.Match[str]) -> str:
    """Unescape a character: the parser would garble the escape."""
    code = int(escape[1] or escape[2] or "0", 16)
    is_character = 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000
    return chr(code) if is_character else escape[0]


def _renamed(found: re.Match[str]) -> str:
    return "start-of-gbnf" if found[1] else found[0]

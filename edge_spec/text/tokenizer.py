"""Turns text into tokens and back, token by token.

A translator of many languages (mBART, M2M-100, NLLB) has a token for each. One stands before its
sources, or after their end, as the tokenizer's own template has it, and one begins its answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from weakref import WeakValueDictionary

import tokenizers
from tokenizers.decoders import DecodeStream

from edge_spec.errors import ModelFileError, UsageError

# As mBART and NLLB name them (en_XX, eng_Latn), and M2M-100 (__en__).
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
_LISTED = 5  # languages in a message
# From here on a text is encoded by the library's batches, which let other threads run meanwhile: a
# megabyte takes a second.
_LONG_CHARACTERS = 1 << 14
_SHOWN = 500  # characters of the library's own words, which may quote the file


@dataclass(frozen=True)
class SourceEnd:
    """The tokens between a source of an encoder-decoder and its answer, and those before it.

    start_id: the one of them that begins the answer; where it also ends the source, twice.
    """

    tokens: tuple[int, ...]
    start_id: int
    before: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)

    def around(self, ids: list[int]) -> list[int]:
        """Returns a source's tokens with what stands around it; one that has begun the answer is
        taken as it is, and one that begins with a language is of that."""
        if ids.count(self.start_id) >= self.tokens.count(self.start_id):
            return ids
        is_named = bool(ids) and ids[0] in self.languages.values()
        return [*(() if is_named else self.before), *ids, *self.tokens]

    @property
    def lacks_language(self) -> bool:
        """Says whether nothing tells a translator in which language to answer."""
        return bool(self.languages) and self.tokens[-1] not in self.languages.values()

    def as_templates_have_it(self, tokenizer: tokenizers.Tokenizer) -> SourceEnd:
        """Returns the same with the languages of a tokenizer, and the one of its template."""
        added = tokenizer.get_added_tokens_decoder()
        named = {each.content: number for number, each in added.items()}
        languages = {name: id for name, id in named.items() if _LANGUAGE.fullmatch(name)}
        if not languages:
            return self
        plain, whole = (
            tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True)
        )
        start = next((at for at in range(len(whole)) if whole[at:][: len(plain)] == plain), None)
        if start is None:  # it changes the text itself
            return replace(self, languages=languages)
        first, last = (
            tuple(each for each in part if each in languages.values())
            for part in (whole[:start], whole[start + len(plain) :])
        )
        tokens = (*self.tokens[:1], *last, *self.tokens[1:])
        return replace(self, tokens=tokens, before=first, languages=languages)

    def translating(self, source: str | None, target: str | None, model: str) -> SourceEnd:
        """Returns the same with the languages of these names, None for what it has. Raises
        UsageError."""
        found = self
        if source is not None:
            found = found._from(self._language(source, "--source-language", model))
        if target is not None:
            found = found._to(self._language(target, "--target-language", model), model)
        return found

    def _from(self, language: int) -> SourceEnd:
        if self.before or self._source_language is None:
            return replace(self, before=(language,))
        return replace(self, tokens=(self.tokens[0], language, *self.tokens[2:]))

    @property
    def _source_language(self) -> int | None:
        """The language that stands after the end of a source."""
        after = self.tokens[1:2]
        is_language = after and after[0] in self.languages.values() and len(self.tokens) > 2
        return after[0] if is_language else None

    def _to(self, language: int, model: str) -> SourceEnd:
        if self.start_id in self.languages.values():
            if language != self.start_id:
                (own,) = (name for name, id in self.languages.items() if id == self.start_id)
                raise UsageError(
                    f"{model} answers in {own} alone", remedy="Leave --target-language out."
                )
            return self
        last = len(self.tokens) - self.tokens[::-1].index(self.start_id)
        return replace(self, tokens=(*self.tokens[:last], language))

    def _language(self, name: str, option: str, model: str) -> int:
        if not self.languages:
            raise UsageError(
                f"{model} has no tokens of languages for {option}", remedy=f"Leave {option} out."
            )
        if name not in self.languages:
            raise UsageError(
                f"{model} has no language {name[:40]!r}",
                remedy=f"Choose one of its {len(self.languages)}, such as {self.some(name)}.",
            )
        return self.languages[name]

    def some(self, name: str = "") -> str:
        """Some of its languages, the nearest to a name before others."""
        names: Sequence[str] = get_close_matches(name, self.languages, _LISTED) or [*self.languages]
        return ", ".join(sorted(names[:_LISTED]))


_open: WeakValueDictionary[bytes, tokenizers.Tokenizer] = WeakValueDictionary()


def _opened(json: str) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer, which nobody changes: one for all that are open with this
    text, such as a model's and its draft's. A large vocabulary takes a third of a second."""
    digest = hashlib.sha256(json.encode("utf-8", "surrogatepass")).digest()
    found = _open.get(digest)
    if found is None:
        found = tokenizers.Tokenizer.from_str(json)
        found.no_truncation()
        found.no_padding()
        _open[digest] = found
    return found


class Tokenizer:
    """A tokenizer.json. Special tokens written out in a text are recognised, none are added."""

    def __init__(self, json: str, bos_id: int | None = None, end: SourceEnd | None = None) -> None:
        """end: of every source of an encoder-decoder."""
        try:
            self._tokenizer = _opened(json)
            self.source_end = None if end is None else end.as_templates_have_it(self._tokenizer)
        except BaseException as error:
            if isinstance(error, Exception) or _is_given_up(error):
                raise _unusable(error) from error
            raise
        self._bos_id = bos_id

    def translating(self, source: str | None, target: str | None, model: str) -> Tokenizer:
        """Returns one that reads sources in a language for answers in another, each by its name;
        None for what `model` does by itself. Raises UsageError."""
        if self.source_end is None:
            raise UsageError(
                f"{model} has no encoder, and reads no source in a language",
                remedy="Leave --source-language and --target-language out.",
            )
        other = copy(self)
        other.source_end = self.source_end.translating(source, target, model)
        return other

    def encode(self, text: str) -> list[int]:
        """Begins with the BOS token where the model asks for one and the text has none, and has the
        end of its source where it is one of an encoder-decoder and has not begun the answer.

        Lone surrogates, which stand for undecodable bytes of a pipe or an argument, become "?".
        Raises ModelFileError where the library gives the tokenizer up.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        try:
            ids = self._encoded(text)
        except BaseException as error:
            if _is_given_up(error):
                raise _unusable(error) from error
            raise
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids if self.source_end is None else self.source_end.around(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens. Raises ModelFileError."""
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        except BaseException as error:
            if _is_given_up(error):
                raise _unusable(error) from error
            raise
        return text

    def _encoded(self, text: str) -> list[int]:
        if len(text) < _LONG_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoded.ids
        return ids

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)

    def to_json(self) -> str:
        """The tokenizer.json."""
        json: str = self._tokenizer.to_str()
        return json

    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, special ones included, and its id."""
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    def added_text(self) -> dict[int, str]:
        """Added tokens that are text, such as a tag, by id: `decode` shows them, unlike special
        ones."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token: one.content for token, one in added if not one.special}

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it, special ones included."""
        return self._tokenizer.id_to_token(token) or ""


def _is_given_up(error: BaseException) -> bool:
    """Says whether the library gave up, on a tokenizer that says what cannot be: by a plain
    Exception, or by a panic of its Rust code, which is no Exception and cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _unusable(error: BaseException) -> ModelFileError:
    return ModelFileError(
        f"the model's tokenizer.json cannot be used: {str(error)[:_SHOWN]}",
        remedy="Download or export the model again.",
    )


class TextStream:
    """Turns tokens into text as they come; the pieces join to `Tokenizer.decode` of them all.

    A character that spans tokens appears with the last of them.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_characters = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # bytes that turn out to be no character change the text before them
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self.finish()
        self._num_characters += len(piece)
        return piece

    def finish(self) -> str:
        """Returns what is left when no more tokens come: an incomplete character's replacement."""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[self._num_characters :]


class StopCutter:
    """Holds text back while it may be the beginning of a stop string; cuts at the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Text that can be shown now. After a stop string `stopped` is set and nothing follows."""
        if self.stopped:
            return ""
        text = self._held + piece
        # The stop string that is complete first, whatever pieces the text comes in.
        found = [
            (text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text
        ]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, when nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        return next(
            (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
        )

"""Turns text into tokens and back, token by token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from weakref import WeakValueDictionary

import tokenizers

from edge_spec.core.text_codec import TextPieces
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.text.given_encoding import (
    changes_text,
    encode_given,
    without_added_from,
)
from edge_spec.text.token_pieces import ByteStream, spelled_bytes

_UNREADABLE = "\ufffd"
_SHOWN = 500  # characters of the library's own words, which may quote the file

# As mBART and NLLB name them (en_XX, eng_Latn), and M2M-100 (__en__).
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
_LISTED = 5  # languages in a message


@dataclass(frozen=True)
class SourceEnd:
    """The tokens between a source of an encoder-decoder and its answer, and those before it.

    A translator of many languages (mBART, M2M-100, NLLB) has a token for each. One stands before
    its sources, or after their end, as the tokenizer's own template has it, and one begins its
    answers. start_id: the one of them that begins the answer; where it also ends the source, twice.
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
        found, known = self, self.languages.values()
        if source is not None:
            language = self._language(source, "--source-language", model)
            is_after = not self.before and len(self.tokens) > 2 and self.tokens[1] in known
            after = (self.tokens[0], language, *self.tokens[2:])
            found = replace(self, tokens=after) if is_after else replace(self, before=(language,))
        if target is not None:
            language = self._language(target, "--target-language", model)
            if self.start_id not in known:
                last = len(found.tokens) - found.tokens[::-1].index(self.start_id)
                found = replace(found, tokens=(*found.tokens[:last], language))
            elif language != self.start_id:
                (own,) = (name for name, id in self.languages.items() if id == self.start_id)
                raise UsageError(
                    f"{model} answers in {own} alone", remedy="Leave --target-language out."
                )
        return found

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


class _Shared:
    """The library's tokenizer, which nobody changes. Its own class takes weak references from
    tokenizers 0.23.1 on only."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self.library = library


_open: WeakValueDictionary[bytes, _Shared] = WeakValueDictionary()


def _share(json: str, num_tokens: int | None) -> _Shared:
    """Return one tokenizer for all that are open with this text, such as a model's and its draft's:
    a large vocabulary takes a third of a second. Raises ModelFileError."""
    text = f"{num_tokens} {json}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    shared = _open.get(digest)
    if shared is None:
        shared = _open[digest] = _Shared(_read(json, num_tokens))
    return shared


def _read(json: str, num_tokens: int | None) -> tokenizers.Tokenizer:
    with _refusing(_is_of_file):
        library = tokenizers.Tokenizer.from_str(json)
        library.no_truncation()
        library.no_padding()
        return library if num_tokens is None else without_added_from(library, num_tokens)


class Tokenizer:
    """A tokenizer.json. Special tokens written out in a text are recognised, none are added."""

    def __init__(
        self,
        json: str,
        bos_id: int | None = None,
        end: SourceEnd | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """end: of every source of an encoder-decoder. num_tokens: that the model scores; text does
        not become any beyond them, such as one that stands for an image."""
        self._shared = _share(json, num_tokens)
        self._tokenizer = self._shared.library
        with _refusing(_is_of_file):
            self.source_end = None if end is None else end.as_templates_have_it(self._tokenizer)
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

    def without_edges(self) -> Tokenizer:
        """Returns one that puts nothing before and after a text."""
        other = copy(self)
        other.source_end, other._bos_id = None, None
        return other

    def encode(self, text: str) -> list[int]:
        """Begins with the BOS token where the model asks for one and the text has none, and has the
        end of its source where it is one of an encoder-decoder and has not begun the answer.

        Lone surrogates, which stand for undecodable bytes of a pipe or an argument, become "?".
        Raises ModelFileError where the library gives the tokenizer up.
        """
        return self._whole(self._encoded, text)

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
        """Raises as `encode` does."""

        def encoded(text: str) -> list[int]:
            return encode_given(self._tokenizer, text, given, control)

        return self._whole(encoded, text)

    def _whole(self, encoded: Callable[[str], list[int]], text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")
        with _refusing(_is_given_up):
            ids = encoded(text)
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids if self.source_end is None else self.source_end.around(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens. Raises ModelFileError."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.finish()

    def _decoded(self, ids: Sequence[int]) -> str:
        with _refusing(_is_given_up):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return text

    def piece(self, token: int) -> bytes:
        """Returns what the token adds within a text, which may be a part of a character; nothing
        for a special token."""
        return self._pieces(token)

    @cached_property
    def _pieces(self) -> Callable[[int], bytes]:
        """Decoders read whole texts: at the beginning of one many leave a space out, and a part of
        a character is no text. So a token is decoded after a letter, and what that cannot show is
        read from the vocabulary."""
        letter = self._encoded("a")[-1:]
        before = self._decoded(letter)

        def piece(token: int) -> bytes:
            text = self._decoded([*letter, token])
            is_apart = text.startswith(before)  # else the decoder joins the two
            text = text[len(before) :] if is_apart else self._decoded([token])
            is_whole = _UNREADABLE not in text
            return text.encode() if is_whole else spelled_bytes(self.token_text(token))

        return cache(piece)

    def _encoded(self, text: str) -> list[int]:
        # A batch lets other threads run meanwhile: a megabyte takes a second.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def stream(self) -> TextPieces:
        return ByteStream(self.piece, self._first_piece)

    def _first_piece(self, token: int) -> bytes:
        """Returns what the token adds at the beginning of a text, where a space may be left out."""
        text = self._decoded([token])
        return self.piece(token) if _UNREADABLE in text else text.encode()

    def vocabulary(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, special ones included, and its id."""
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Returns the id of each added token by its text, and whether it is special."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {one.content: (token, one.special) for token, one in added}

    @property
    def reads_variants(self) -> bool:
        """Says whether an added token may be spelled otherwise, such as in other letters."""
        if not changes_text(self._tokenizer.normalizer):
            return False
        return any(one.normalized for one in self._tokenizer.get_added_tokens_decoder().values())

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it, special ones included."""
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary spells so, special ones included."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def special_text(self, token: int) -> str:
        """Returns how a special token is written, which no text shows; "" for other tokens."""
        return self._specials.get(token, "")

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = self.added_tokens().items()
        return {token: text for text, (token, is_special) in added if is_special}


def _is_given_up(error: BaseException) -> bool:
    """Says whether the library gave up, on a tokenizer that says what cannot be: by a plain
    Exception, or by a panic of its Rust code, which is no Exception and cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _is_of_file(error: BaseException) -> bool:
    """Return False for what a damaged file does not raise, such as a library of another version."""
    of_code = (AttributeError, ImportError, TypeError)
    return _is_given_up(error) or (isinstance(error, Exception) and not isinstance(error, of_code))


@contextmanager
def _refusing(is_fault: Callable[[BaseException], bool]) -> Iterator[None]:
    """Raises ModelFileError for such an error."""
    try:
        yield
    except BaseException as error:
        if not is_fault(error):
            raise
        raise ModelFileError(
            f"the model's tokenizer.json cannot be used: {str(error)[:_SHOWN]}",
            remedy="Download or export the model again.",
        ) from error

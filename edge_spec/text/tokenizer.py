"""Encode and decode text with a tokenizer.json."""

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
_SHOWN = 500  # of the library's error, which may quote the file

# Names in mBART and NLLB (en_XX, eng_Latn), and in M2M-100 (__en__).
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
_LISTED = 5  # languages in a message


@dataclass(frozen=True)
class SourceEnd:
    """The tokens around an encoder-decoder's source: `before` it, and `tokens` up to the answer.

    A multilingual translator (mBART, M2M-100, NLLB) has a token for each language. One is before or
    after the source, as in the tokenizer's template, and one begins the answer. start_id: begins
    the answer; it occurs twice if it also ends the source.
    """

    tokens: tuple[int, ...]
    start_id: int
    before: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)

    def around(self, ids: list[int]) -> list[int]:
        """Add these tokens to a source, unless it already begins the answer. A leading language
        token replaces `before`."""
        if ids.count(self.start_id) >= self.tokens.count(self.start_id):
            return ids
        is_named = bool(ids) and ids[0] in self.languages.values()
        return [*(() if is_named else self.before), *ids, *self.tokens]

    @property
    def lacks_language(self) -> bool:
        """Whether no token tells a translator the language of its answer."""
        return bool(self.languages) and self.tokens[-1] not in self.languages.values()

    def as_templates_have_it(self, tokenizer: tokenizers.Tokenizer) -> SourceEnd:
        """Add the tokenizer's languages, and its template's default."""
        added = tokenizer.get_added_tokens_decoder()
        named = {each.content: number for number, each in added.items()}
        languages = {name: id for name, id in named.items() if _LANGUAGE.fullmatch(name)}
        if not languages:
            return self
        plain, whole = (
            tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True)
        )
        start = next((at for at in range(len(whole)) if whole[at:][: len(plain)] == plain), None)
        if start is None:  # the template changes the text itself
            return replace(self, languages=languages)
        first, last = (
            tuple(each for each in part if each in languages.values())
            for part in (whole[:start], whole[start + len(plain) :])
        )
        tokens = (*self.tokens[:1], *last, *self.tokens[1:])
        return replace(self, tokens=tokens, before=first, languages=languages)

    def translating(self, source: str | None, target: str | None, model: str) -> SourceEnd:
        """Set languages by name; None keeps the default. Raises UsageError."""
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
        """List a few languages, similar names first."""
        names: Sequence[str] = get_close_matches(name, self.languages, _LISTED) or [*self.languages]
        return ", ".join(sorted(names[:_LISTED]))


class _Shared:
    """Supports weak references, which the library's own class only does since 0.23.1."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self.library = library


_open: WeakValueDictionary[bytes, _Shared] = WeakValueDictionary()


def _share(json: str, num_tokens: int | None) -> _Shared:
    """Return one shared, immutable tokenizer per text, as a target and its draft often have the
    same: reading a large vocabulary takes a third of a second. Raises ModelFileError."""
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
    """A tokenizer.json. Special tokens spelled in a text are recognized; none are added."""

    def __init__(
        self,
        json: str,
        bos_id: int | None = None,
        end: SourceEnd | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """end: around an encoder-decoder's source. num_tokens: size of the logits; text never
        becomes an added token beyond it, such as one for images."""
        self._shared = _share(json, num_tokens)
        self._tokenizer = self._shared.library
        with _refusing(_is_of_file):
            self.source_end = None if end is None else end.as_templates_have_it(self._tokenizer)
        self._bos_id = bos_id

    def translating(self, source: str | None, target: str | None, model: str) -> Tokenizer:
        """Return a copy that translates between named languages; None keeps the default. Raises
        UsageError."""
        if self.source_end is None:
            raise UsageError(
                f"{model} has no encoder, and reads no source in a language",
                remedy="Leave --source-language and --target-language out.",
            )
        other = copy(self)
        other.source_end = self.source_end.translating(source, target, model)
        return other

    def without_edges(self) -> Tokenizer:
        """Return a copy that adds nothing before and after a text."""
        other = copy(self)
        other.source_end, other._bos_id = None, None
        return other

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the BOS token if the model wants one, and with an encoder-decoder's
        source end unless the text begins the answer.

        Lone surrogates, from undecodable bytes of a pipe or an argument, become "?". Raises
        ModelFileError.
        """
        return self._whole(self._encoded, text)

    def encode_given(self, text: str, given: Sequence[int], control: Collection[int]) -> list[int]:
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
        """Decode without special tokens. Raises ModelFileError."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.finish()

    def _decoded(self, ids: Sequence[int]) -> str:
        with _refusing(_is_given_up):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return text

    def piece(self, token: int) -> bytes:
        return self._pieces(token)

    @cached_property
    def _pieces(self) -> Callable[[int], bytes]:
        """Decoders read whole texts: many drop a leading space, and none shows part of a character.
        So decode a token after a letter; if that fails, take its bytes from the vocabulary."""
        letter = self._encoded("a")[-1:]
        before = self._decoded(letter)

        def piece(token: int) -> bytes:
            text = self._decoded([*letter, token])
            is_apart = text.startswith(before)  # else the decoder merges the two
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
        text = self._decoded([token])
        return self.piece(token) if _UNREADABLE in text else text.encode()

    def vocabulary(self) -> dict[str, int]:
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {one.content: (token, one.special) for token, one in added}

    @property
    def reads_variants(self) -> bool:
        if not changes_text(self._tokenizer.normalizer):
            return False
        return any(one.normalized for one in self._tokenizer.get_added_tokens_decoder().values())

    def token_text(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def special_text(self, token: int) -> str:
        return self._specials.get(token, "")

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = self.added_tokens().items()
        return {token: text for text, (token, is_special) in added if is_special}


def _is_given_up(error: BaseException) -> bool:
    """The library gives up on inconsistent tokenizers with a plain Exception, or with a Rust panic,
    which is no Exception and cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _is_of_file(error: BaseException) -> bool:
    """Return False for errors of our code or another library version."""
    of_code = (AttributeError, ImportError, TypeError)
    return _is_given_up(error) or (isinstance(error, Exception) and not isinstance(error, of_code))


@contextmanager
def _refusing(is_fault: Callable[[BaseException], bool]) -> Iterator[None]:
    """Turn these errors into ModelFileError."""
    try:
        yield
    except BaseException as error:
        if not is_fault(error):
            raise
        raise ModelFileError(
            f"the model's tokenizer.json cannot be used: {str(error)[:_SHOWN]}",
            remedy="Download or export the model again.",
        ) from error

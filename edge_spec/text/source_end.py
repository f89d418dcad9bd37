"""Tells what stands between a source of an encoder-decoder and its answer.

A translator of many languages (mBART, M2M-100, NLLB) has a token for each. One stands before its
sources, or after their end, as the tokenizer's own template has it, and one begins its answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import tokenizers

from edge_spec.errors import UsageError

# As mBART and NLLB name them (en_XX, eng_Latn), and M2M-100 (__en__).
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
_LISTED = 5  # languages in a message


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

"""Checks whether one model can draft for another: tokens, size, context."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from edge_spec.diagnostics.doctor.finding import Finding, note, ok, warning
from edge_spec.diagnostics.doctor.subject import Examined
from edge_spec.diagnostics.doctor.text import CONVERSATION, SAMPLE
from edge_spec.errors import EdgeSpecError
from edge_spec.models.draft_choice import LARGEST_SHARE
from edge_spec.text.vocabulary import Compared, compare

_SHOWN = 3
_LISTED = 30  # in JSON
_SAME_FAMILY = "One of the target's family is quicker: edge-spec pull hf:ORG/NAME --draft auto."
_PAD = re.compile(r"<\|?pad\|?>|\[PAD\]|<\|\w*_pad_id\|>")
_MARKER = re.compile(r"<\|[^<>|\s]+\|>|<[a-z_]+>|</[a-z_]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class SpecialToken:
    """Names what both models have for one purpose; ids are None where one has none."""

    purpose: str  # "bos", "eos", "pad" or "marker"
    target_id: int | None
    target: str | None
    draft_id: int | None
    draft: str | None

    @property
    def is_same(self) -> bool:
        return (self.target_id, self.target) == (self.draft_id, self.draft)

    def __str__(self) -> str:
        sides = ((self.target_id, self.target), (self.draft_id, self.draft))
        shown = ("none" if id is None else f"{id}: {reprlib.repr(token)}" for id, token in sides)
        return f"{self.purpose} {' | '.join(shown)}"


@dataclass(frozen=True)
class Tokens:
    """Says what two vocabularies have in common. ratio: tokens of the draft for each of the
    target's, in one text of several languages and code."""

    target_size: int
    draft_size: int
    num_shared_texts: int
    compared: Compared
    specials: list[SpecialToken]
    ratio: float

    def numbers(self) -> dict[str, object]:
        return {
            "same": self.compared.is_same,
            "drafting": "draft-model" if self.compared.is_same else "retokenized",
            "target_size": self.target_size,
            "draft_size": self.draft_size,
            "num_shared_ids": self.compared.num_shared,
            "num_different": len(self.compared.different),
            "num_shared_texts": self.num_shared_texts,
            "different": [
                {"id": id, "target": token, "draft": other}
                for id, token, other in self.compared.different[:_LISTED]
            ],
            "special": [asdict(each) for each in self.specials],
            "draft_tokens_per_target_token": self.ratio,
        }


def compare_tokens(target: Examined, draft: Examined) -> Tokens:
    """Raises an EdgeSpecError for a tokenizer that cannot be read."""
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    text = SAMPLE + "".join(str(message["content"]) for message in CONVERSATION)
    num_draft, num_target = (len(each.text.tokenizer.encode(text)) for each in (draft, target))
    return Tokens(
        len(known),
        len(drafted),
        len(known.keys() & drafted.keys()),
        compare(known, drafted),
        special_tokens(target, draft, known, drafted),
        num_draft / num_target,
    )


def check_pair(
    target: Examined, draft: Examined, tokens: Tokens, numbers: dict[str, object]
) -> Iterator[Finding]:
    numbers["vocabulary"] = tokens.numbers()
    yield from _tokens(tokens)
    yield from _specials(tokens.specials, is_same=tokens.compared.is_same)
    if target.is_other or draft.is_other:
        yield note("size", "not known before a model is converted, nor is its context")
        return
    yield _size(target, draft, numbers)
    yield _context(target, draft)


def _tokens(tokens: Tokens) -> Iterator[Finding]:
    """Differences token by token, as target | draft, and what follows from them."""
    compared = tokens.compared
    sizes = tokens.target_size, tokens.draft_size
    if compared.is_same:
        alone = [size - compared.num_shared for size in sizes]
        beyond = f"; {alone[0]} only the target's, {alone[1]} the draft's" if any(alone) else ""
        yield ok("tokens", f"the same {compared.num_shared} ids{beyond}")
        return
    yield warning(
        "tokens",
        f"{len(compared.different)} of {compared.num_shared} ids that both have differ "
        f"({sizes[0]} | {sizes[1]} tokens): draft tokens are passed on as text, {tokens.ratio:.2f} "
        "tokens of the draft for each of the target's",
        _SAME_FAMILY,
    )
    shown = "; ".join(
        f"{id}: {reprlib.repr(token)} | {reprlib.repr(other)}"
        for id, token, other in compared.different[:_SHOWN]
    )
    if shown:
        yield note("tokens", shown)


def _specials(specials: list[SpecialToken], *, is_same: bool) -> Iterator[Finding]:
    different = [each for each in specials if not each.is_same]
    if not different:
        names = ", ".join(f"{each.purpose} {each.target}" for each in specials)
        yield ok("specials", f"the same {len(specials)}: {names}")
        return
    shown = "; ".join(map(str, different[:_SHOWN]))
    more = f"; {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    if is_same:
        yield warning(
            "specials", f"{shown}{more}", "Draft tokens at the end of an answer may be wrong."
        )
    else:
        yield note("specials", f"{shown}{more}")


def special_tokens(
    target: Examined, draft: Examined, known: Mapping[str, int], drafted: Mapping[str, int]
) -> list[SpecialToken]:
    """Those that the target has: first and last of a text, padding, and what its chat template
    writes around messages."""

    def paired(purpose: str, target_id: int | None, draft_id: int | None) -> SpecialToken:
        texts = [
            next((token for token, each in tokens.items() if each == id), None)
            for id, tokens in ((target_id, known), (draft_id, drafted))
        ]
        return SpecialToken(purpose, target_id, texts[0], draft_id, texts[1])

    ends = (next(iter(each.text.eos_ids), None) for each in (target, draft))
    found = [
        paired("bos", target.text.bos_id, draft.text.bos_id),
        paired("eos", *ends),
        paired("pad", _padding(known), _padding(drafted)),
    ]
    named = {each.target for each in found}
    found += [
        paired("marker", known[marker], drafted.get(marker))
        for marker in _markers(target)
        if marker in known and marker not in named
    ]
    return [each for each in found if each.target_id is not None or each.draft_id is not None]


def _padding(tokens: Mapping[str, int]) -> int | None:
    likely = ((token, id) for token, id in tokens.items() if "pad" in token.lower())
    found = [(token, id) for token, id in likely if _PAD.fullmatch(token)]
    return min(found)[1] if found else None


def _markers(target: Examined) -> list[str]:
    try:
        rendered = target.text.rendered(CONVERSATION)
    except EdgeSpecError:  # there is no template, or the check of it tells
        return []
    return sorted(set(_MARKER.findall(rendered)))


def _size(target: Examined, draft: Examined, numbers: dict[str, object]) -> Finding:
    share = draft.config.num_parameters / target.config.num_parameters
    numbers["size_share"] = share
    found = f"the draft has {share:.0%} of the target's parameters"
    if share <= LARGEST_SHARE:
        return ok("size", found)
    remedy = f"Choose one with at most {LARGEST_SHARE:.0%}: each draft token takes a step of it."
    return warning("size", found, remedy)


def _context(target: Examined, draft: Examined) -> Finding:
    length, whole = draft.config.context_length, target.config.context_length
    found = f"the draft reads {length} tokens, the target {whole}"
    if length >= whole:
        return ok("context", found)
    return warning(
        "context",
        f"{found}: after {length} nothing is drafted and rounds are plain",
        f"Give --context {length}, or a draft with a longer context.",
    )

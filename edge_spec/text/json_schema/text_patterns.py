"""Says of strings with one regular expression what their forms say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_spec.text.json_schema.patterns import UnknownPatternError, is_found
from edge_spec.text.json_schema.scalars import Strings


def fits(text: str, form: Strings) -> bool:
    """Says whether a text surely fits a form."""
    if form.values is not None and text not in form.values:
        return False
    if not form.has_length(text) or text in form.excluded or form.formats:
        return False
    try:
        return all(is_found(pattern, text) for pattern in form.patterns)
    except UnknownPatternError:
        return False


def pattern_of(form: Strings) -> str | None:
    """What all strings of the form match, and no others; None if that is more than one pattern."""
    patterns = [*form.patterns]
    if form.excluded:
        patterns.append(other_than(form.excluded))
    if form.min_length or form.max_length is not None:
        most = "" if form.max_length is None else form.max_length
        patterns.append(f"^(?s:.{{{form.min_length},{most}}})$")
    if form.formats or len(patterns) > 1:
        return None
    return patterns[0] if patterns else "^(?s:.*)$"


def other_than(values: Iterable[str]) -> str:
    """A regular expression of all strings but these."""
    return f"^(?:{_other_than(sorted(set(values)), 0)})$"


def _other_than(values: Sequence[str], depth: int) -> str:
    """Of what follows the first `depth` characters, which are the same of all values."""
    heads = sorted({value[depth] for value in values if len(value) > depth})
    choices = [] if any(len(value) == depth for value in values) else [""]
    listed = "".join(f"\\x{{{ord(head):x}}}" for head in heads)
    choices.append(f"[^{listed}](?s:.)*" if heads else "(?s:.)+")
    for head in heads:
        rest = [value for value in values if len(value) > depth and value[depth] == head]
        choices.append(f"\\x{{{ord(head):x}}}(?:{_other_than(rest, depth + 1)})")
    return "|".join(choices)

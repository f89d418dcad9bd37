"""Tells which special tokens of a model a text can have."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from edge_spec.diagnostics.doctor.finding import Finding, ok, warning
from edge_spec.diagnostics.doctor.subject import Subject
from edge_spec.errors import EdgeSpecError
from edge_spec.models.pair_bundle import ROLES

_SHOWN = 4


def check_control_tokens(subject: Subject) -> Iterator[Finding]:
    """Tells those of the target, which alone reads conversations."""
    text = subject.roles[ROLES[0]][0].text
    if text.chat_template is None:
        added = text.tokenizer.added_tokens().items()
        special = {name for name, (_, is_special) in added if is_special}
        yield ok("control tokens", f"{_listed(special)}; prompts can have all of them")
        return
    try:
        tokens = text.control_tokens
    except EdgeSpecError:  # of the template, which a check of its own tells
        return
    if not tokens.are_between_messages:
        found = "the template writes none between messages: one can imitate others"
        yield warning("control tokens", found, "Use a model that has them for untrusted messages.")
    for name in tokens.written_by_text():
        found = f"a message can have {name!r}, which begins or ends a text"
        yield warning(
            "control tokens", found, "Use a file whose tokenizer knows it as a special token."
        )
    tags = f"; the assistant and the system may write {_listed(tokens.tags)}" if tokens.tags else ""
    yield ok(
        "control tokens",
        f"{_listed(tokens.control)} are the template's alone{tags}; raw prompts and "
        "--parse-special read them",
        control_tokens=sorted(tokens.control),
        tags=sorted(tokens.tags),
    )


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(islice(sorted(names, key=lambda name: (len(name), name)), _SHOWN))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more}" if names else "none"

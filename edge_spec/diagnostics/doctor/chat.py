"""Checks that a chat template asks for an answer, and that the answer will end."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence

from edge_spec.diagnostics.doctor.finding import Finding, fault, ok, warning
from edge_spec.diagnostics.doctor.subject import Subject
from edge_spec.diagnostics.doctor.text import CONVERSATION
from edge_spec.errors import UnsupportedModelError
from edge_spec.models.pair_bundle import ROLES
from edge_spec.models.pair_export import template_sha256
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.chat_template import Message

_SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
_EXPORT_AGAIN = "Export it again."
_OTHER_TEMPLATE = "Use another conversion of the model, or `generate --raw`."
_ADD_END = "Add its token to eos_token_id in generation_config.json"
_OTHER_ENDS = {  # by format. `--stop` does not help: such a token has no text
    "checkpoint": f"{_ADD_END}.",
    "gguf": "Use a file whose tokenizer.ggml.eos_token_id is its token, or convert the model "
    "again.",
}
_CONVERT_AGAIN = f"{_ADD_END} of the model that it was made from, and convert that again."


def check_template(subject: Subject) -> Iterator[Finding]:
    """Each template in its sandbox, on a short conversation; then what the target's says. A draft's
    is never used."""
    templates = {str(each): each.text.chat_template for each in subject.roles[ROLES[0]]}
    first = next(iter(templates.values()))
    listed = template_sha256(first) if subject.pair is None else subject.pair.chat_template_sha256
    for name, template in templates.items():
        if template_sha256(template) != listed:
            yield fault("chat template", f"that of {name} is another one", _EXPORT_AGAIN)
            return
    if first is None:
        yield warning("chat template", "there is none: prompts are continued", "Use a chat model.")
        return
    tokens = subject.variants[0].text.chat_prompt(CONVERSATION)
    outside = [token for token in tokens if not 0 <= token < subject.variants[0].vocab_size]
    if outside:
        yield fault("chat template", f"it makes the token {outside[0]}", _EXPORT_AGAIN)
        return
    yield ok("chat template", f"renders a conversation of {len(tokens)} tokens in its sandbox")
    first_variant = subject.variants[0]
    yield from _turns(first_variant.text, _OTHER_ENDS.get(first_variant.format, _CONVERT_AGAIN))


def _turns(text: ChatFormat, other_ends: str) -> Iterator[Finding]:
    """Tries a question, a system message, and several turns. other_ends: the remedy where a turn
    ends in another token than a text."""
    system = _system_problem(text)
    if system is not None:
        yield warning("system", system, "It is said in the first question instead.")
    question, answer, follow_up = (str(message["content"]) for message in CONVERSATION)
    asked, several = text.rendered(CONVERSATION[:1]), text.rendered(CONVERSATION)
    if question not in asked or not _in_order(several, (question, answer, follow_up)):
        yield fault("turns", "the template leaves out what was said", _OTHER_TEMPLATE)
        return
    _, _, behind_question = asked.rpartition(question)
    before_answer, _, behind_answer = several.partition(question)[2].partition(answer)
    beginning = _beginning_problem(behind_question, before_answer)
    end = _end_problem(text, behind_answer)
    if beginning is not None:
        yield warning("turns", beginning, _OTHER_TEMPLATE)
    if end is not None:
        yield warning("turns", end, other_ends)
    if beginning is None and end is None:
        yield ok("turns", "asks for an answer, which ends in an end of text")


def _beginning_problem(behind_question: str, before_answer: str) -> str | None:
    """behind_question: of a prompt; before_answer: what a prompt of several turns has there."""
    asked, wanted = behind_question.rstrip(), before_answer.rstrip()
    if not wanted.startswith(asked) or wanted == asked:
        return None
    missing = _short(wanted.removeprefix(asked))
    return f"a prompt ends without {missing}, which begins an answer"


def _end_problem(text: ChatFormat, behind_answer: str) -> str | None:
    """behind_answer: what a prompt of several turns has there."""
    turn_end = behind_answer.partition(str(CONVERSATION[2]["content"]))[0]
    ends = [name for name in map(text.tokenizer.token_text, text.eos_ids) if name]
    if not ends or any(end in turn_end for end in ends):
        return None
    named = " or ".join(map(_short, ends))
    return f"an answer ends in {_short(turn_end)}, but a text in {named}: answers may not end"


def _system_problem(text: ChatFormat) -> str | None:
    try:
        rendered = text.template().render((_SYSTEM, CONVERSATION[0]))
    except UnsupportedModelError as error:
        return error.shown
    return None if str(_SYSTEM["content"]) in rendered else "the template leaves it out"


def _in_order(rendered: str, parts: Sequence[str]) -> bool:
    at = 0
    for part in parts:
        at = rendered.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _short(text: str) -> str:
    return reprlib.repr(text.strip())

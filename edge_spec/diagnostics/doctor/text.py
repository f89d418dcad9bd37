"""Checks that all variants of a model are one model and write as one, that its chat template asks
for an answer, and that the answer will end."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from edge_spec.diagnostics.doctor.finding import Finding, fault, note, ok, warning
from edge_spec.diagnostics.doctor.subject import OTHER_FORMAT, Examined, Subject
from edge_spec.errors import EdgeSpecError, UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.models.pair_bundle import ROLES
from edge_spec.models.pair_export import prove, template_sha256
from edge_spec.text.chat_format import BY_NAME, BY_TEMPLATE, ChatFormat
from edge_spec.text.plain_messages import Message
from edge_spec.text.vocabulary import require_same_vocabulary

CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Which is larger, 3.11 or 3.9?"},
    {"role": "assistant", "content": "As numbers, 3.9."},
    {"role": "user", "content": "Write a function that sorts ['Zoë', 'naïve', '東京']."},
)
SAMPLE = "The naïve café, 1,024 * 3.5 = 3584;\n\tdef f(x): return x**2  # 東京 🙂\n"
_EXPORT_AGAIN = "Export it again."
# Formats state contexts and rotary frequencies each in their own way; these they state alike.
_SHAPE = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size"),
)
_SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
_OTHER_TEMPLATE = "Use another conversion of the model, or `generate --raw`."
_ADD_END = "Add its token to eos_token_id in generation_config.json"
_OTHER_ENDS = {  # by format
    "checkpoint": f"{_ADD_END}.",
    "gguf": "Use a file whose tokenizer.ggml.eos_token_id is its token, or convert the model "
    "again.",
}
_CONVERT_AGAIN = f"{_ADD_END} of the model that it was made from, and convert that again."


def check_architecture(subject: Subject) -> Iterator[Finding]:
    for role, variants in subject.roles.items():
        if variants[0].is_other:
            who = runtimes.OTHER_ARCHITECTURES[OTHER_FORMAT]
            found = f"{variants[0].source.model_type}, converted by {who} at the first start"
            yield note("architecture", found).of(role)
            continue
        first = variants[0].config
        shape = {name: asdict(first)[name] for name in _SHAPE}
        others = [
            each for each in variants if any(asdict(each.config)[n] != shape[n] for n in shape)
        ]
        for each in others:
            found = f"{each} is another model than {variants[0]}"
            yield fault("architecture", found, _EXPORT_AGAIN).of(role)
        if not others:
            yield ok(
                "architecture",
                f"{first.architecture}, {first.num_layers} layers, {first.hidden_size} wide, "
                f"{first.vocab_size} tokens, context {first.context_length}",
            ).of(role)


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """One file where there are files, and the same ids for one text everywhere."""
    different = False
    for variants in subject.roles.values():
        hashes = {each.manifest.tokenizer_sha256 for each in variants if each.manifest}
        if subject.pair is not None and variants[0].role == ROLES[0]:
            hashes.add(subject.pair.tokenizer.sha256)
        if len(hashes) > 1:
            different = True
            yield fault(
                "tokenizer", f"the {variants[0].role} has {len(hashes)} of them", _EXPORT_AGAIN
            )
        ids = variants[0].text.tokenizer.encode(SAMPLE)
        for each in variants[1:]:
            if each.text.tokenizer.encode(SAMPLE) != ids:
                different = True
                yield fault(
                    "tokenizer", f"{each} reads a text otherwise than {variants[0]}", _EXPORT_AGAIN
                )
    if not different:
        size = len(subject.variants[0].text.tokenizer.vocabulary())
        same = ", the same in all variants" if len(subject.variants) > 1 else ""
        yield ok("tokenizer", f"{size} tokens{same}")


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Proves again that the draft's tokens are the target's."""
    roles = subject.roles
    if subject.pair is None or len(roles) < 2:
        return
    # A GGUF file spells its tokens again, so that digests are compared of a tokenizer.json.
    target, draft = (sorted(roles[role], key=lambda each: not each.is_bundle)[0] for role in ROLES)
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    require_same_vocabulary(known, drafted, str(target), str(draft))
    proof = prove(known, drafted)
    if target.is_bundle and draft.is_bundle and proof != subject.pair.vocabulary:
        stated = "it is not the one that pair.json states"
        yield fault("vocabulary", stated, _EXPORT_AGAIN).of("pair")
        return
    yield ok("vocabulary", f"proved again: {proof.num_shared} ids").of("pair")


def check_ends(subject: Subject) -> Iterator[Finding]:
    """The tokens that end an answer, and what states each or where it was found."""
    for role, variants in subject.roles.items():
        ends = [each.text.eos_ids for each in variants]
        outside = [
            (each, token)
            for each in variants
            for token in (each.manifest or each.source).eos_ids
            if not 0 <= token < each.vocab_size
        ]
        for each, token in outside:
            yield fault("end of text", f"{each}: {token} is no token", _EXPORT_AGAIN)
        if len({frozenset(ids) for ids in ends}) > 1:
            yield warning("end of text", f"the variants of the {role} differ in it", _EXPORT_AGAIN)
        elif not ends[0]:
            yield warning("end of text", f"the {role} has none", "Answers end at --max-tokens.")
        elif role == ROLES[0]:
            by_source: dict[str, list[str]] = {}
            for token, source in variants[0].text.end_sources.items():
                named = _short(variants[0].text.tokenizer.token_text(token))
                by_source.setdefault(source, []).append(f"{token} {named}")
            stated = (f"{', '.join(each)} by {source}" for source, each in by_source.items())
            yield ok("end of text", f"tokens {'; '.join(stated)}")


def scored_tokens(variant: Examined, most: int) -> list[int]:
    """Returns the tokens of the conversation above, or of a text where the model has no
    template."""
    tokens: list[int] = []
    with suppress(EdgeSpecError):
        tokens = variant.text.chat_prompt(CONVERSATION)
    return (tokens or variant.text.tokenizer.encode(SAMPLE))[:most]


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
    if named := ", ".join(first_variant.text.named_templates):
        try:
            first_variant.text.template_variables  # noqa: B018 -- raises where one does not compile
        except UnsupportedModelError as error:
            yield warning("chat template", f"one of {named}: {error.shown}", _OTHER_TEMPLATE)
        else:
            yield ok("chat template", f"others, by name: {named}")
    yield from _turns(first_variant.text, _OTHER_ENDS.get(first_variant.format, _CONVERT_AGAIN))


def _turns(text: ChatFormat, other_ends: str) -> Iterator[Finding]:
    """Tries a question, a system message, and several turns. other_ends: the remedy where a turn
    ends in another token than a text."""
    system = _system_problem(text)
    if system is not None:
        yield warning("system", system, "It is said in the first question instead.")
    question, answer, follow_up = (str(message["content"]) for message in CONVERSATION)
    asked, several = text.rendered(CONVERSATION[:1]), text.rendered(CONVERSATION)
    in_order = ".*".join(map(re.escape, (question, answer, follow_up)))
    if question not in asked or not re.search(in_order, several, re.DOTALL):
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
    stated = [id for id, by in text.end_sources.items() if by not in (BY_NAME, BY_TEMPLATE)]
    named = " or ".join(map(_short, map(text.tokenizer.token_text, stated or text.eos_ids)))
    return f"an answer ends in {_short(turn_end)}, but a text in {named}: answers may not end"


def _system_problem(text: ChatFormat) -> str | None:
    try:
        rendered = text.template().render((_SYSTEM, CONVERSATION[0]))
    except UnsupportedModelError as error:
        return error.shown
    return None if str(_SYSTEM["content"]) in rendered else "the template leaves it out"


def _short(text: str) -> str:
    return reprlib.repr(text.strip())

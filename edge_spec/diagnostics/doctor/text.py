"""Checks that all variants of a model are one model, and write as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from edge_spec.diagnostics.doctor.finding import Finding, fault, note, ok, warning
from edge_spec.diagnostics.doctor.subject import OTHER_FORMAT, Examined, Subject
from edge_spec.errors import EdgeSpecError
from edge_spec.models import runtimes
from edge_spec.models.pair_bundle import ROLES
from edge_spec.models.pair_export import prove
from edge_spec.text.chat_template import Message
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
    """The tokens that end an answer."""
    for role, variants in subject.roles.items():
        ends = [each.text.eos_ids for each in variants]
        outside = [
            (each, token)
            for each in variants
            for token in each.text.eos_ids
            if not 0 <= token < each.vocab_size
        ]
        for each, token in outside:
            yield fault("end of text", f"{each}: {token} is no token", _EXPORT_AGAIN)
        if len({frozenset(ids) for ids in ends}) > 1:
            yield warning("end of text", f"the variants of the {role} differ in it", _EXPORT_AGAIN)
        elif not ends[0]:
            yield warning("end of text", f"the {role} has none", "Answers end at --max-tokens.")
        elif not outside and role == ROLES[0]:
            yield ok("end of text", f"token {', '.join(map(str, ends[0]))}")


def scored_tokens(variant: Examined, most: int) -> list[int]:
    """Returns the tokens of the conversation above, or of a text where the model has no
    template."""
    tokens: list[int] = []
    with suppress(EdgeSpecError):
        tokens = variant.text.chat_prompt(CONVERSATION)
    return (tokens or variant.text.tokenizer.encode(SAMPLE))[:most]

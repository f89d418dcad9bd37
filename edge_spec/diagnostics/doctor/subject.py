"""A model that `edge-spec doctor` looks at: a pair bundle, a bundle, a GGUF file or a Hugging Face
directory. Whether its files are the listed ones, all variants are one model and open here, its chat
template asks for an answer, and the answer will end."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core import entry_points
from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress, Runtime, RuntimeOptions
from edge_spec.core.text_codec import TextCodec
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.doctor.report import Finding, fault, note, of_error, ok, warning
from edge_spec.errors import (
    BundleError,
    DeviceError,
    EdgeSpecError,
    MissingDependencyError,
    UnknownArchitectureError,
    UnsupportedModelError,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import (
    ROLES,
    Bundle,
    Manifest,
    PairManifest,
    Variant,
    check_file,
    find_foreign,
    find_member,
    is_bundle,
    is_pair,
    open_bundle,
    read_manifest,
    read_pair,
)
from edge_spec.models.model_text import text_of_bundle, text_of_info, text_with
from edge_spec.models.pair_export import prove_vocabulary
from edge_spec.text.chat_format import BY_NAME, BY_TEMPLATE, ChatFormat
from edge_spec.text.plain_messages import Message
from edge_spec.text.tokenizer import Tokenizer

# What architectures are converted to that our own readers do not know.
OTHER_FORMAT = next(iter(runtimes.OTHER_ARCHITECTURES))


@dataclass(frozen=True)
class Examined:
    """One model in one format. What it says of itself is read when it is asked for, which may raise
    an EdgeSpecError."""

    role: str
    format: str
    path: Path
    listed: Variant | None = None  # by pair.json
    is_other: bool = False  # a directory of an architecture that only another exporter knows

    def __str__(self) -> str:
        return f"{self.role} {self.format}" if self.listed else self.format

    @cached_property
    def source(self) -> Any:
        """Returns what a runtime opens. The files of a bundle are not looked at again."""
        if self.is_bundle:
            return Bundle(self.path, read_manifest(self.path))
        if self.is_other:
            return runtimes.exporter_for(OTHER_FORMAT, self.path)[1]
        read = runtimes.open_checkpoint if self.path.is_dir() else runtimes.open_model_info
        return read(self.path)

    @property
    def is_bundle(self) -> bool:
        return is_bundle(self.path)

    @property
    def manifest(self) -> Manifest | None:
        return self.source.manifest if self.is_bundle else None

    @property
    def config(self) -> ModelConfig:
        """Returns its architecture; asked only of one that is not `is_other`: its shape is known
        when it is converted."""
        config: ModelConfig = self.source.config
        return config

    @cached_property
    def vocab_size(self) -> int:
        """Returns the model's, or the tokenizer's of one that `is_other`."""
        if self.is_other:
            return _num_tokens(self.text.tokenizer)
        return self.config.vocab_size

    @cached_property
    def text(self) -> ChatFormat:
        if self.is_bundle:
            return text_of_bundle(self.source)
        if self.is_other:
            return _text_of_other(self.source)
        reader = "reference" if self.path.is_dir() else "llamacpp"
        return text_of_info(self.source, runtimes.load_runtime(reader))


@dataclass(frozen=True)
class Subject:
    """hashes: whether files are hashed even where that takes seconds."""

    path: Path
    pair: PairManifest | None
    variants: tuple[Examined, ...]
    progress: Progress
    hashes: bool = False

    @property
    def is_other(self) -> bool:
        """Says whether only another exporter knows the architecture: what is at `path` it converts,
        or has, and the variant is in the cache."""
        return self.variants[0].is_other or (
            self.pair is None and self.variants[0].path != self.path
        )

    @property
    def roles(self) -> dict[str, list[Examined]]:
        found: dict[str, list[Examined]] = {}
        for each in self.variants:
            found.setdefault(each.role, []).append(each)
        return found


def open_subject(
    path: Path,
    progress: Progress,
    hashes: bool = False,
    kept: Callable[[], Path] | None = None,
) -> Subject:
    """kept: where a model is kept that only another exporter knows, once that has converted it.

    Raises ModelFileError for a manifest or a header that is not valid, and for what is none of the
    four, UnsupportedModelError; MissingDependencyError where that exporter is not installed.
    """
    if is_pair(path):
        pair = read_pair(path)
        variants = tuple(
            Examined(role, variant.format, path / variant.path, variant)
            for role, member in pair.members()
            for variant in member.variants
        )
        return Subject(path, pair, variants, progress, hashes)
    member = find_member(path)
    if member is not None:  # the target or the draft of a pair bundle, alone
        return open_subject(member.directory / member.member.variants[0].path, progress, hashes)
    if is_bundle(path):
        bundle = Examined(ROLES[0], read_manifest(path).format, path)
        return Subject(path, None, (bundle,), progress, hashes)
    alone = Examined(ROLES[0], "checkpoint" if path.is_dir() else "gguf", path)
    try:
        alone.source  # noqa: B018 -- raises for what is none
    except UnknownArchitectureError:
        alone = _other(path, kept)
    return Subject(path, None, (alone,), progress, hashes)


def _other(path: Path, kept: Callable[[], Path] | None) -> Examined:
    """Describes it as it was converted already, else by what is known before. Raises as
    `open_subject`."""
    if kept is not None:
        bundle = kept()
        with suppress(BundleError):
            return Examined(ROLES[0], open_bundle(bundle, hashed=False).manifest.format, bundle)
    other = Examined(ROLES[0], "checkpoint", path, is_other=True)
    other.source  # noqa: B018 -- raises where it cannot be converted
    return other


def _text_of_other(source: Any) -> ChatFormat:
    tokenizer = Tokenizer(source.read_tokenizer(), source.bos_id if source.adds_bos else None)
    return text_with(tokenizer, source, _num_tokens(tokenizer))


def _num_tokens(tokenizer: TextCodec) -> int:
    return 1 + max(tokenizer.vocabulary().values(), default=-1)


_SHOWN = 3
HASHED_BYTES = 1_000_000_000  # in all; more takes seconds, and is hashed where it is asked for


def check_files(subject: Subject) -> Iterator[Finding]:
    """Size and sha256 of each, and what is there without being listed."""
    manifest = _manifest(subject)
    if manifest is None:
        yield _unlisted(subject)
        return
    listed = manifest.files
    total = sum(entry.num_bytes for entry in listed.values())
    hashed = subject.hashes or total <= HASHED_BYTES
    problems: list[BundleError] = []
    for done, (name, entry) in enumerate(listed.items()):
        subject.progress("Checking files", done / len(listed))
        try:
            check_file(subject.path, name, entry, hashed)
        except BundleError as error:
            problems.append(error)
    subject.progress("Checking files", 1.0)
    for problem in problems[:_SHOWN]:
        yield fault("files", problem.shown, problem.remedy)
    if len(problems) > _SHOWN:
        yield fault("files", f"{len(problems) - _SHOWN} more are wrong", _EXPORT_AGAIN)
    foreign = find_foreign(subject.path, manifest)
    if foreign:
        names = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        yield warning("files", f"not listed and not used: {names}", "Delete them.")
    if not problems:
        count = f"{len(listed)} files, {total / 1e6:.1f} MB"
        if hashed:
            yield ok("files", f"{count}, all as they were written")
        else:
            yield note("files", f"{count}, of the right sizes, not hashed", "Add --hash.")


def _unlisted(subject: Subject) -> Finding:
    """Describes files without a list: their headers were read, and that all tensors lie within the
    files, where our own readers know the architecture."""
    path = subject.path
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    whole = "" if subject.is_other and path.is_dir() else ", no tensor is cut off"
    form = "Hugging Face" if path.is_dir() else "GGUF"
    return ok("files", f"{form}, {size / 1e6:.1f} MB{whole}; it has no hashes")


def _manifest(subject: Subject) -> Manifest | PairManifest | None:
    if subject.pair is not None:
        return subject.pair
    return None if subject.is_other else subject.variants[0].manifest


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
_ADD_END = (
    "Add its token to eos_token_id (tokenizer.ggml.eos_token_id) of the model that it was made "
    "from, and convert that again."
)
_OTHER_TEMPLATE = "Use another conversion of the model, or `generate --raw`."


def check_architecture(subject: Subject) -> Iterator[Finding]:
    """What each model is; that all variants of a pair's model have one shape."""
    for role, variants in subject.roles.items():
        if variants[0].is_other:
            who = runtimes.OTHER_ARCHITECTURES[OTHER_FORMAT]
            found = f"{variants[0].source.model_type}, converted by {who} at the first start"
            yield note("architecture", found).of(role)
            continue
        first = variants[0].config
        for each in variants[1:]:
            if any(getattr(each.config, name) != getattr(first, name) for name in _SHAPE):
                found = f"{each} is another model than {variants[0]}"
                yield fault("architecture", found, _EXPORT_AGAIN).of(role)
                return
        yield ok(
            "architecture",
            f"{first.architecture}, {first.num_layers} layers, {first.hidden_size} wide, "
            f"{first.vocab_size} tokens, context {first.context_length}",
        ).of(role)


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """The same ids for one text in all variants."""
    for variants in subject.roles.values():
        ids = variants[0].text.tokenizer.encode(SAMPLE)
        for each in variants[1:]:
            if each.text.tokenizer.encode(SAMPLE) != ids:
                found = f"{each} reads a text otherwise than {variants[0]}"
                yield fault("tokenizer", found, _EXPORT_AGAIN)
                return
    yield ok("tokenizer", f"{len(subject.variants[0].text.tokenizer.vocabulary())} tokens")


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Proves again that the draft's tokens are the target's."""
    roles = subject.roles
    if subject.pair is None or len(roles) < 2:
        return
    # A GGUF file spells its tokens again, so that digests are compared of a tokenizer.json.
    target, draft = (sorted(roles[role], key=lambda each: not each.is_bundle)[0] for role in ROLES)
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    proof = prove_vocabulary(known, drafted, str(target), str(draft))
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


def check_template(subject: Subject) -> Iterator[Finding]:
    """Renders a short conversation in the target's sandbox. A draft's template is never used."""
    templates = [each.text.chat_template for each in subject.roles[ROLES[0]]]
    if len(set(templates)) > 1:
        yield fault("chat template", "the variants of the target differ in it", _EXPORT_AGAIN)
        return
    if templates[0] is None:
        yield warning("chat template", "there is none: prompts are continued", "Use a chat model.")
        return
    tokens = subject.variants[0].text.chat_prompt(CONVERSATION)
    outside = [token for token in tokens if not 0 <= token < subject.variants[0].vocab_size]
    if outside:
        yield fault("chat template", f"it makes the token {outside[0]}", _EXPORT_AGAIN)
        return
    yield ok("chat template", f"renders a conversation of {len(tokens)} tokens in its sandbox")
    text = subject.variants[0].text
    if not text.control_tokens.are_between_messages:
        found = "the template writes no control token between messages: one can imitate others"
        yield warning("chat template", found, "Use a model that has them for untrusted messages.")
    yield from _turns(text)


def _turns(text: ChatFormat) -> Iterator[Finding]:
    """Tries a question, a system message, and several turns."""
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
        yield warning("turns", end, _ADD_END)
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


_REASON_CHARACTERS = 200  # of a library's own error


def check_opening(subject: Subject) -> Iterator[Finding]:
    for each in subject.variants:
        if each.is_other:
            yield warning("opens", "not opened: it is not converted yet", "Start it once.")
            continue
        subject.progress(f"Opening {each}", 0.0)
        yield _open(each).of(each.role)
        subject.progress(f"Opening {each}", 1.0)


def _open(each: Examined) -> Finding:
    reason = f"no runtime is installed that reads {each.format}"
    for runtime in _readers(each.format):
        try:
            with (
                closing(runtime.open(each.source, RuntimeOptions())) as model,
                closing(model.open_session()) as session,
            ):
                logits = session.forward(TokenTree.chain(0)).logits.copy()
        except (MissingDependencyError, DeviceError) as error:
            reason = f"{runtime.name}: {error.shown}"
            continue
        except EdgeSpecError as error:
            return fault("opens", f"{each}: {error.shown}", error.remedy)
        except Exception as error:  # a library may fail in any way on a graph that is not ours
            why = of_error(error)[:_REASON_CHARACTERS]
            return fault("opens", f"{each}: {runtime.name} failed: {why}", _EXPORT_AGAIN)
        if not np.isfinite(logits).all():
            return fault("opens", f"{each}: its scores are no numbers", _EXPORT_AGAIN)
        return ok("opens", f"{each}, with {runtime.name}")
    return warning("opens", f"{each} was not opened: {reason}", "Check it where it runs.")


def _readers(format: str) -> list[Runtime]:
    """The usual runtimes first; those whose own modules cannot be imported here are left out."""
    usual = [name for name, _ in runtimes.AUTO_RUNTIMES]
    others = [name for name in entry_points.names("runtimes") if name not in usual]
    found = []
    for name in (*usual, *others):
        with suppress(MissingDependencyError):
            found.append(runtimes.load_runtime(name))
    return [runtime for runtime in found if format in runtimes.formats_of(runtime)]

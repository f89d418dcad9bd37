"""A model that `edge-spec doctor` examines: a pair bundle, a bundle, a GGUF file or a Hugging Face
directory. Each check yields findings: whether the files are those that were written, all variants
are one model and open here, the chat template asks for an answer, and the answer will end."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
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
from edge_spec.diagnostics.doctor.report import (
    Finding,
    Severity,
    capped,
    fault,
    note,
    ok,
    problem,
    settled,
    warning,
)
from edge_spec.diagnostics.report_files import describe_error
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
    check_file,
    find_foreign,
    find_member,
    is_bundle,
    is_pair,
    open_bundle,
    read_listing,
    read_manifest,
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
    """One model in one format. Its properties read the files when they are first asked for, which
    may raise an EdgeSpecError."""

    role: str
    format: str
    path: Path
    is_in_pair: bool = False
    is_other: bool = False  # a directory of an architecture that only another exporter knows

    def __str__(self) -> str:
        return f"{self.role} {self.format}" if self.is_in_pair else self.format

    @cached_property
    def source(self) -> Any:
        """Return what a runtime opens. The files of a bundle are not checked again."""
        if is_bundle(self.path):
            return Bundle(self.path, read_manifest(self.path))
        if self.is_other:
            return runtimes.exporter_for(OTHER_FORMAT, self.path)[1]
        read = runtimes.open_checkpoint if self.path.is_dir() else runtimes.open_model_info
        return read(self.path)

    @property
    def config(self) -> ModelConfig:
        """Return its architecture. One that `is_other` has none until it is converted."""
        config: ModelConfig = self.source.config
        return config

    @cached_property
    def text(self) -> ChatFormat:
        source = self.source
        if isinstance(source, Bundle):
            return text_of_bundle(source)
        if self.is_other:
            bos_id = source.bos_id if source.adds_bos else None
            tokenizer = Tokenizer(source.read_tokenizer(), bos_id)
            return text_with(tokenizer, source, _num_tokens(tokenizer))
        return text_of_info(source, runtimes.load_runtime("auto", {self.format}))

    @cached_property
    def vocab_size(self) -> int:
        """Return the model's, or the tokenizer's of one that `is_other`."""
        if self.is_other:
            return _num_tokens(self.text.tokenizer)
        return self.config.vocab_size


def _num_tokens(tokenizer: TextCodec) -> int:
    return 1 + max(tokenizer.vocabulary().values(), default=-1)


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
        """Return True if only another exporter knows the architecture: the variant is then what it
        will convert, or a conversion from the cache."""
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
    """kept: where the conversion is cached of a model that only another exporter knows.

    Raises ModelFileError for a manifest or a header that is not valid, UnsupportedModelError for
    what is none of the four, MissingDependencyError where that exporter is not installed.
    """
    pair, member = None, find_member(path)
    if member is not None and not is_pair(path):  # one model of a pair bundle, alone
        path = member.directory / member.member.variants[0].path
    if is_pair(path):
        pair = read_listing(path, PairManifest)
        variants = tuple(
            Examined(role, variant.format, path / variant.path, is_in_pair=True)
            for role, member in pair.members()
            for variant in member.variants
        )
        return Subject(path, pair, variants, progress, hashes)
    if is_bundle(path):
        alone = Examined(ROLES[0], read_manifest(path).format, path)
    else:
        alone = Examined(ROLES[0], "checkpoint" if path.is_dir() else "gguf", path)
        try:
            alone.source  # noqa: B018 -- raises for what is no model
        except UnknownArchitectureError:
            alone = _open_other(path, kept)
    return Subject(path, None, (alone,), progress, hashes)


def _open_other(path: Path, kept: Callable[[], Path] | None) -> Examined:
    """Return its conversion if there is one, else the directory. Raises as `open_subject`."""
    if kept is not None:
        bundle = kept()
        with suppress(BundleError):
            return Examined(ROLES[0], open_bundle(bundle, hashed=False).manifest.format, bundle)
    other = Examined(ROLES[0], "checkpoint", path, is_other=True)
    other.source  # noqa: B018 -- raises where it cannot be converted
    return other


HASHED_BYTES = 1_000_000_000  # in all; more takes seconds, and is hashed where it is asked for
_EXPORT_AGAIN = "Export it again."


def check_files(subject: Subject) -> Iterator[Finding]:
    """Compare sizes and hashes with the manifest's, and find files that it does not list."""
    manifest = _manifest(subject)
    if manifest is None:
        yield _describe_unlisted(subject)
        return
    listed = manifest.files
    total = sum(entry.num_bytes for entry in listed.values())
    hashed = subject.hashes or total <= HASHED_BYTES
    problems = []
    for done, (name, entry) in enumerate(listed.items()):
        subject.progress("Checking files", done / len(listed))
        try:
            check_file(subject.path, name, entry, hashed)
        except BundleError as error:
            problems.append(fault("files", error.shown, error.remedy))
    subject.progress("Checking files", 1.0)
    yield from capped(problems)
    strange = (
        warning("files", f"{name} is not listed, and not used", "Delete it.")
        for name in find_foreign(subject.path, manifest)
    )
    yield from capped(list(strange))
    count = f"{len(listed)} files, {total / 1e6:.1f} MB"
    if not problems and hashed:
        yield ok("files", f"{count}, all as they were written")
    elif not problems:
        yield note("files", f"{count}, sizes are right, not hashed", "Add --hash.")


def _describe_unlisted(subject: Subject) -> Finding:
    """Describe files without a manifest. Reading a header checks that all tensors are within the
    files, where our own readers know the architecture."""
    path = subject.path
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    whole = "" if subject.is_other and path.is_dir() else ", no tensor is cut off"
    form = "Hugging Face" if path.is_dir() else "GGUF"
    return ok("files", f"{form}, {size / 1e6:.1f} MB{whole}; it has no hashes to compare")


def _manifest(subject: Subject) -> Manifest | PairManifest | None:
    source = None if subject.pair is not None or subject.is_other else subject.variants[0].source
    return source.manifest if isinstance(source, Bundle) else subject.pair


CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Which is larger, 3.11 or 3.9?"},
    {"role": "assistant", "content": "As numbers, 3.9."},
    {"role": "user", "content": "Write a function that sorts ['Zoë', 'naïve', '東京']."},
)
SAMPLE = "The naïve café, 1,024 * 3.5 = 3584;\n\tdef f(x): return x**2  # 東京 🙂\n"
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


def _find_odd(variants: Sequence[Examined], of: Callable[[Examined], object]) -> Examined | None:
    """Return a variant that differs from the first one in this."""
    first = of(variants[0])
    return next((each for each in variants[1:] if of(each) != first), None)


def check_architecture(subject: Subject) -> Iterator[Finding]:
    for role, variants in subject.roles.items():
        if variants[0].is_other:
            who = runtimes.OTHER_ARCHITECTURES[OTHER_FORMAT]
            found = f"{variants[0].source.model_type}, converted by {who} at the first start"
            yield note("architecture", found).of(role)
            continue
        odd = _find_odd(variants, lambda each: [getattr(each.config, name) for name in _SHAPE])
        if odd is not None:
            found = f"{odd} is another model than {variants[0]}"
            yield fault("architecture", found, _EXPORT_AGAIN).of(role)
            return
        first = variants[0].config
        yield ok(
            "architecture",
            f"{first.architecture}, {first.num_layers} layers, {first.hidden_size} wide, "
            f"{first.vocab_size} tokens, context {first.context_length}",
        ).of(role)


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    for variants in subject.roles.values():
        odd = _find_odd(variants, lambda each: each.text.tokenizer.encode(SAMPLE))
        if odd is not None:
            found = f"{odd} gives other token ids than {variants[0]} for the same text"
            yield fault("tokenizer", found, _EXPORT_AGAIN)
            return
    yield ok("tokenizer", f"{len(subject.variants[0].text.tokenizer.vocabulary())} tokens")


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Prove again that the draft's tokens are the target's."""
    roles = subject.roles
    if subject.pair is None or len(roles) < 2:
        return
    # A GGUF file spells its tokens again, so that digests are compared of a tokenizer.json.
    target, draft = (
        sorted(roles[role], key=lambda each: not is_bundle(each.path))[0] for role in ROLES
    )
    known, drafted = (each.text.tokenizer.vocabulary() for each in (target, draft))
    proof = prove_vocabulary(known, drafted, str(target), str(draft))
    are_bundles = is_bundle(target.path) and is_bundle(draft.path)
    if are_bundles and proof != subject.pair.vocabulary:
        found = "the proof in pair.json is of other tokenizers"
        yield fault("vocabulary", found, _EXPORT_AGAIN).of("pair")
    else:
        yield ok("vocabulary", f"proved again: {proof.num_shared} ids").of("pair")


def check_ends(subject: Subject) -> Iterator[Finding]:
    """Find the tokens that end an answer, and what declares each."""
    for role, variants in subject.roles.items():
        for each in variants:
            declared = each.source.manifest if isinstance(each.source, Bundle) else each.source
            for token in declared.eos_ids:
                if not 0 <= token < each.vocab_size:
                    yield fault("end of text", f"{each}: {token} is no token", _EXPORT_AGAIN)
        text = variants[0].text
        if _find_odd(variants, lambda each: frozenset(each.text.eos_ids)):
            yield warning("end of text", f"the variants of the {role} differ in it", _EXPORT_AGAIN)
        elif not text.eos_ids:
            yield warning("end of text", f"the {role} has none", "Answers end at --max-tokens.")
        elif role == ROLES[0]:
            by_source: dict[str, list[str]] = {}
            for token, source in text.end_sources.items():
                named = _short(text.tokenizer.token_text(token))
                by_source.setdefault(source, []).append(f"{token} {named}")
            found = (f"{', '.join(each)} by {source}" for source, each in by_source.items())
            yield ok("end of text", f"tokens {'; '.join(found)}")


def check_template(subject: Subject) -> Iterator[Finding]:
    """Render a short conversation in the target's sandbox. A draft's template is never used."""
    variants = subject.roles[ROLES[0]]
    text = variants[0].text
    if _find_odd(variants, lambda each: each.text.chat_template):
        yield fault("chat template", "the variants of the target differ in it", _EXPORT_AGAIN)
        return
    if text.chat_template is None:
        yield warning("chat template", "there is none: prompts are continued", "Use a chat model.")
        return
    tokens = text.chat_prompt(CONVERSATION)
    outside = [token for token in tokens if not 0 <= token < variants[0].vocab_size]
    if outside:
        yield fault("chat template", f"it makes the token {outside[0]}", _EXPORT_AGAIN)
        return
    yield ok("chat template", f"renders a conversation of {len(tokens)} tokens in its sandbox")
    if not text.control_tokens.are_between_messages:
        found = "the template writes no control token between messages: one can imitate others"
        yield warning("chat template", found, "Use a model that has them for untrusted messages.")
    yield from _check_turns(text)


def _check_turns(text: ChatFormat) -> Iterator[Finding]:
    """Try a system message, a question, and several turns."""
    system = "the template leaves it out"
    try:
        if str(_SYSTEM["content"]) in text.template().render((_SYSTEM, CONVERSATION[0])):
            system = ""
    except UnsupportedModelError as error:
        system = error.shown
    if system:
        yield warning("system", system, "It is said in the first question instead.")
    question, answer, follow_up = (str(message["content"]) for message in CONVERSATION)
    asked, several = text.rendered(CONVERSATION[:1]), text.rendered(CONVERSATION)
    in_order = ".*".join(map(re.escape, (question, answer, follow_up)))
    if question not in asked or not re.search(in_order, several, re.DOTALL):
        yield fault("turns", "the template leaves out what was said", _OTHER_TEMPLATE)
        return
    prompt_end = asked.rpartition(question)[2].rstrip()
    before_answer, _, rest = several.partition(question)[2].partition(answer)
    wanted, turn_end = before_answer.rstrip(), rest.partition(follow_up)[0]
    missing = wanted.startswith(prompt_end) and wanted.removeprefix(prompt_end)
    if missing:
        found = f"a prompt ends without {_short(missing)}, which begins an answer"
        yield warning("turns", found, _OTHER_TEMPLATE)
    token_text = text.tokenizer.token_text
    ends = [name for name in map(token_text, text.eos_ids) if name]
    never_ends = bool(ends) and not any(end in turn_end for end in ends)
    if never_ends:
        stated = [id for id, by in text.end_sources.items() if by not in (BY_NAME, BY_TEMPLATE)]
        named = " or ".join(_short(token_text(id)) for id in stated or text.eos_ids)
        found = f"an answer ends in {_short(turn_end)}, but a text in {named}: answers may not end"
        yield warning("turns", found, _ADD_END)
    if not missing and not never_ends:
        yield ok("turns", "asks for an answer, which ends in an end of text")


def _short(text: str) -> str:
    return reprlib.repr(text.strip())


_REASON_CHARACTERS = 200  # of a library's own error


def check_opening(subject: Subject) -> Iterator[Finding]:
    """Open every variant and score one token."""
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
            why = describe_error(error)[:_REASON_CHARACTERS]
            return fault("opens", f"{each}: {runtime.name} failed: {why}", _EXPORT_AGAIN)
        if not np.isfinite(logits).all():
            return fault("opens", f"{each}: its scores are not numbers", _EXPORT_AGAIN)
        return ok("opens", f"{each}, with {runtime.name}")
    return warning("opens", f"{each} was not opened: {reason}", "Check it where it runs.")


def _readers(format: str) -> list[Runtime]:
    """Return the runtimes that read a format, the usual ones first; those whose modules cannot be
    imported here are left out."""
    usual = [name for name, _ in runtimes.AUTO_RUNTIMES]
    found = []
    for name in dict.fromkeys([*usual, *entry_points.names("runtimes")]):
        with suppress(MissingDependencyError):
            found.append(runtimes.load_runtime(name))
    return [runtime for runtime in found if format in runtimes.formats_of(runtime)]


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "files": check_files,
    "architecture": check_architecture,
    "tokenizer": check_tokenizer,
    "vocabulary": check_vocabulary,
    "chat template": check_template,
    "end of text": check_ends,
    "opens": check_opening,
}
_OF_TARGETS = ("chat template", "end of text")
_AFTER_FAULTS = ("vocabulary", *_OF_TARGETS)  # all others would only find the fault again


def examine(
    path: Path,
    progress: Progress,
    *,
    open_models: bool = False,
    hashes: bool = False,
    chats: bool = True,
    kept: Callable[[], Path] | None = None,
) -> tuple[Subject | None, list[Finding]]:
    """Run all checks on the model at `path`; None where it is none.

    open_models: open every variant that something installed can open, which takes the memory of
    the largest. hashes: as `Subject` has it. chats: whether it is to answer, with its template.
    kept: as `open_subject` has it.
    """
    try:
        subject = open_subject(path, progress, hashes, kept)
    except MissingDependencyError as error:  # what it lacks, starting it lacks, too
        return None, [fault("model", error.shown, error.remedy)]
    except (EdgeSpecError, OSError) as error:
        return None, [problem("model", error)]
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if name not in _AFTER_FAULTS and any(each.level is Severity.FAULT for each in findings):
            break
        if (chats or name not in _OF_TARGETS) and (open_models or name != "opens"):
            findings += settled(name, check(subject))
    return subject, findings

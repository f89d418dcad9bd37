"""Check a model of a plan: its files are intact, its chat template asks for an answer, and answers
end."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Progress
from edge_spec.diagnostics.doctor.report import Finding, fault, note, ok, warning
from edge_spec.errors import UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.models.bundle import (
    ROLES,
    Bundle,
    Manifest,
    PairManifest,
    check_file,
    find_foreign,
    is_bundle,
    read_listing,
    read_manifest,
)
from edge_spec.models.draft_choice import cheapest
from edge_spec.models.model_plan import ModelPlan, PreparedModel
from edge_spec.models.model_text import text_of_info
from edge_spec.models.source import Source
from edge_spec.text.chat_format import BY_NAME, BY_TEMPLATE, ChatFormat
from edge_spec.text.plain_messages import Message

HASHED_BYTES = 1_000_000_000  # in all; hashing more takes seconds and must be requested


@dataclass(frozen=True)
class Examined:
    """prepared: None if a start converts the model first. published: declares its text: a manifest,
    a model file, or what another library's exporter will convert."""

    role: str
    plan: ModelPlan
    prepared: PreparedModel | None
    published: Any

    @classmethod
    def of(cls, role: str, plan: ModelPlan, progress: Progress) -> Examined:
        """Read only headers. Raises an EdgeSpecError if a start could not open it."""
        plan.require_devices()
        prepared = plan.find()
        if prepared is None:
            plan.require_convertible()
            _, published = runtimes.exporter_for(plan.format, plan.source.at(plan.format))
            return cls(role, plan, None, published)
        if role == ROLES[1]:
            prepared = cheapest(prepared, plan.source, progress, makes=False)
        source = prepared.source
        return cls(role, plan, prepared, source.manifest if isinstance(source, Bundle) else source)

    @property
    def config(self) -> ModelConfig | None:
        """None before conversion by another library's exporter."""
        if self.prepared is not None:
            return self.prepared.config
        config = getattr(self.published, "config", None)
        return config if isinstance(config, ModelConfig) else None

    @cached_property
    def text(self) -> ChatFormat:
        """Raises an EdgeSpecError for an unreadable tokenizer."""
        if self.prepared is not None:
            return self.prepared.text
        return text_of_info(self.published, self.plan.runtime)


def check_files(source: Source, hashes: bool) -> Iterator[Finding]:
    """Compare sizes and hashes with the manifest; find unlisted files. hashes: also of files that
    take seconds. Raises BundleError."""
    directory, manifest = source.path, _manifest(source)
    if source.member is not None:
        directory = source.member.directory
    if manifest is None:
        form = "Hugging Face" if directory.is_dir() else "GGUF"
        size = source.num_bytes / 1e6
        yield ok("files", f"{form}, {size:.1f} MB; it has no hashes to compare")
        return
    listed = manifest.files
    total = sum(entry.num_bytes for entry in listed.values())
    hashed = hashes or total <= HASHED_BYTES
    for done, (name, entry) in enumerate(listed.items()):
        source.progress("Checking files", done / len(listed))
        check_file(directory, name, entry, hashed)
    source.progress("Checking files", 1.0)
    if foreign := find_foreign(directory, manifest):
        found = f"{len(foreign)} files are not listed, and not used: {', '.join(foreign)}"
        yield warning("files", found, "Delete them.")
    count = f"{len(listed)} files, {total / 1e6:.1f} MB"
    if hashed:
        yield ok("files", f"{count}, all as they were written")
    else:
        yield note("files", f"{count}, sizes are right, not hashed", "Add --hash.")


def _manifest(source: Source) -> Manifest | PairManifest | None:
    if source.member is not None:
        return read_listing(source.member.directory, PairManifest)
    return read_manifest(source.path) if is_bundle(source.path) else None


def check_model(model: Examined) -> Iterator[Finding]:
    config = model.config
    if config is None:
        converter = runtimes.OTHER_ARCHITECTURES[model.plan.format]
        found = f"{model.published.model_type}, converted by {converter} at the first start"
        yield note("architecture", found)
        return
    yield ok(
        "architecture",
        f"{config.architecture}, {config.num_layers} layers, {config.hidden_size} wide, "
        f"{config.vocab_size} tokens, context {config.context_length}",
    )
    yield ok("tokenizer", f"{len(model.text.tokenizer.vocabulary())} tokens")


def check_ends(model: Examined, vocab_size: int) -> Iterator[Finding]:
    """Report end tokens, and what declares each."""
    for token in model.published.eos_ids:
        if not 0 <= token < vocab_size:
            yield fault("end of text", f"{token} is no token", "Export it again.")
    text = model.text
    if not text.eos_ids:
        yield warning("end of text", "there is none", "Answers end at --max-tokens.")
        return
    by_source: dict[str, list[str]] = {}
    for token, source in text.end_sources.items():
        named = _short(text.tokenizer.token_text(token))
        by_source.setdefault(source, []).append(f"{token} {named}")
    found = (f"{', '.join(each)} by {source}" for source, each in by_source.items())
    yield ok("end of text", f"tokens {'; '.join(found)}")


CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Which is larger, 3.11 or 3.9?"},
    {"role": "assistant", "content": "As numbers, 3.9."},
    {"role": "user", "content": "Write a function that sorts ['Zoë', 'naïve', '東京']."},
)
_SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
_ADD_END = (
    "Add its token to eos_token_id (tokenizer.ggml.eos_token_id) of the model that it was made "
    "from, and convert that again."
)
_OTHER_TEMPLATE = "Use another conversion of the model, or `generate --raw`."


def check_template(text: ChatFormat, vocab_size: int) -> Iterator[Finding]:
    """Render a short conversation in the sandbox."""
    if text.chat_template is None:
        yield warning("chat template", "there is none: prompts are continued", "Use a chat model.")
        return
    tokens = text.chat_prompt(CONVERSATION)
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        yield fault("chat template", f"it makes the token {outside[0]}", "Export it again.")
        return
    yield ok("chat template", f"renders a conversation of {len(tokens)} tokens in its sandbox")
    if not text.control_tokens.are_between_messages:
        found = "the template writes no control token between messages: one can imitate others"
        yield warning("chat template", found, "Use a model that has them for untrusted messages.")
    yield from _check_turns(text)


def _check_turns(text: ChatFormat) -> Iterator[Finding]:
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

"""Ask a model for the text between a prefix and a suffix, in the form that it was trained on.

The model's files declare the tokens that begin the parts; else a known form applies whose tokens
the vocabulary has. All input stays text. To fit the context, the oldest other files are cut first,
then the prefix's beginning and the suffix's end. Cuts move in steps: if each typed letter moved
them, each would need a full prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_spec.core.model_info import SpecialTokens
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import ContextFullError, UnsupportedModelError
from edge_spec.text.control_tokens import PlainText

# As in llama.cpp's server, which knows neither.
REPOSITORY_NAME, FILE_NAME = "myproject", "filename"
_SNIPPET = "\n\n--- snippet ---\n\n"  # precedes another file if the model has no token for that
_SUFFIX_SHARE = 4  # the suffix gets 1/4 of the room, and what the prefix leaves
_STEP_TOKENS = 256
_LINE_TOKENS = 64  # tokens to drop at most to cut at the end of a line


class _Names(NamedTuple):
    """The tokens that begin the parts of one form. middle: None if the answer directly follows the
    prefix."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


_STATED = _Names("", "", "")  # what a model's files declare precedes known forms
_FORMS = (
    _Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Names(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    _Names("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    _Names("<PRE>", "<SUF>", "<MID>"),
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Names("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon H1
    _Names("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Names("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<repo_name>", "<reponame>", "<REPO>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
_PADDING = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "\u2581<EOT>", "<EOT>")


class InfillPrompt(list[int]):
    """ends: tokens that end the answer besides the usual ones. is_cut: some input did not fit."""

    def __init__(self, tokens: Sequence[int], ends: frozenset[int], *, is_cut: bool) -> None:
        super().__init__(tokens)
        self.ends = ends
        self.is_cut = is_cut


def room_beside(context_length: int, max_tokens: int | None) -> int:
    """Return how many tokens a prompt may have: up to a quarter of the context is kept for an
    answer of `max_tokens` (None: no limit)."""
    whole = context_length
    return whole - min(whole if max_tokens is None else max_tokens, whole // 4)


@dataclass(frozen=True)
class InfillTokens:
    """The infill tokens of one model."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    repository: int | None
    file: int | None  # followed by the name of a file and its text
    padding: int | None

    @property
    def all(self) -> frozenset[int]:
        """All of them; a generated one ends the answer, since none occurs in text."""
        found = (self.prefix, self.suffix, self.middle, self.repository, self.file, self.padding)
        return frozenset(token for token in found if token is not None)


def infill_tokens(codec: TextCodec, stated: SpecialTokens) -> InfillTokens | None:
    """Return None if the model has no infill tokens. stated: declared tokens, by transformers'
    names for Code Llama's (prefix_token ...)."""

    def of(name: str, *texts: str | None) -> int | None:
        told = stated.get(f"{name}_token")
        known = [each for each in (told, *texts) if isinstance(each, str) and each]
        ids = map(codec.token_id, known)
        return next((token for token in ids if token is not None), None)

    for names in (_STATED, *_FORMS):
        prefix, suffix = of("prefix", names.prefix), of("suffix", names.suffix)
        middle = of("middle", names.middle)
        if prefix is None or suffix is None or (middle is None and names.middle is not None):
            continue
        spelled = codec.token_text(prefix)  # also for a declared one
        known = next((each for each in _FORMS if each.prefix == spelled), names)
        return InfillTokens(
            prefix,
            suffix,
            None if known.middle is None else middle,
            known.suffix_first,
            of("repository", *_REPOSITORY),
            of("file", *_FILE),
            of("padding", *_PADDING),
        )
    return None


class Infill:
    """Builds infill prompts for one model. Any thread may call."""

    def __init__(self, codec: TextCodec, stated: SpecialTokens, ends: Collection[int]) -> None:
        """stated: see `infill_tokens`. ends: tokens that end every answer. Raises
        UnsupportedModelError."""
        tokens = infill_tokens(codec, stated)
        if tokens is None:
            raise UnsupportedModelError(
                "the model has no tokens for a text between a prefix and a suffix",
                remedy="Ask a model that was trained to fill in, such as Qwen2.5-Coder or "
                "StarCoder2, or give the prefix alone as a prompt.",
            )
        self.tokens = tokens
        self._codec = codec
        self._plain = PlainText(codec, tokens.all.union(ends))

    def prompt(
        self,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        room: int,
        names_file: bool = False,
        suffix_first: bool | None = None,
    ) -> InfillPrompt:
        """Return at most `room` tokens.

        files: names and texts of other files, which come first. names_file: give this file a name
        even without others, if the model has a token for it. suffix_first: overrides the model's
        order. Raises ContextFullError.
        """
        is_named = (bool(files) or names_file) and self.tokens.file is not None
        own = self._header(FILE_NAME) if is_named else []
        started = self._repository() if is_named else []
        fixed = len(self._plain.beginning) + len(started) + len(own) + 3
        left = room - fixed
        if left < 1:
            raise ContextFullError(
                f"a prompt has {fixed} tokens beside its texts, the context has room for {room}",
                remedy="Ask for fewer tokens, or load the model with a longer context.",
            )
        before, after = self._plain.tokens(prefix), self._plain.following(suffix)
        kept_after = self._without_end(after, max(left // _SUFFIX_SHARE, left - len(before)))
        kept_before = self._without_beginning(before, left - len(kept_after))
        is_cut = (kept_before, kept_after) != (before, after)
        # The room left by a cut text would change with each typed letter.
        left = 0 if is_cut else left - len(before) - len(after)
        extra, is_whole = self._files(files, left)
        if suffix_first is None:
            suffix_first = self.tokens.suffix_first
        parts = [[self.tokens.prefix, *kept_before], [self.tokens.suffix, *kept_after]]
        first, second = reversed(parts) if suffix_first else parts
        middle = [] if self.tokens.middle is None else [self.tokens.middle]
        return InfillPrompt(
            [*self._plain.beginning, *started, *extra, *own, *first, *second, *middle],
            self.tokens.all,
            is_cut=is_cut or not is_whole,
        )

    def _files(self, files: Sequence[tuple[str, str]], room: int) -> tuple[list[int], bool]:
        """Return as many of the last files as fit, and whether that is all."""
        found: list[int] = []
        for name, text in reversed(files):
            header, body = self._header(name), self._plain.tokens(text)
            left = room - len(found) - len(header)
            kept = self._without_beginning(body, left) if left > 0 else []
            if body and not kept:
                return found, False
            found = [*header, *kept, *found]
            if kept != body:
                return found, False
        return found, True

    def _header(self, name: str) -> list[int]:
        if self.tokens.file is None:
            return self._plain.tokens(_SNIPPET)
        return [self.tokens.file, *self._plain.tokens(f"{name}\n")]

    def _repository(self) -> list[int]:
        if self.tokens.repository is None:
            return []
        return [self.tokens.repository, *self._plain.tokens(f"{REPOSITORY_NAME}\n")]

    def _without_beginning(self, tokens: list[int], room: int) -> list[int]:
        """Keep the end, from the beginning of a line if one is near."""
        if len(tokens) <= room:
            return tokens
        at = _stepped(len(tokens) - room, room)
        for place in range(at, min(at + _LINE_TOKENS, len(tokens))):
            if self._ends_line(tokens[place - 1]):
                return tokens[place:]
        return tokens[at:]

    def _without_end(self, tokens: list[int], room: int) -> list[int]:
        """Keep the beginning, up to the end of a line if one is near."""
        if len(tokens) <= room:
            return tokens
        at = max(0, len(tokens) - _stepped(len(tokens) - room, room))
        for place in range(at, max(at - _LINE_TOKENS, 0), -1):
            if self._ends_line(tokens[place - 1]):
                return tokens[:place]
        return tokens[:at]

    def _ends_line(self, token: int) -> bool:
        return self._codec.decode([token]).endswith("\n")


def _stepped(num_cut: int, room: int) -> int:
    step = max(1, min(_STEP_TOKENS, room // 8))
    return -(-num_cut // step) * step

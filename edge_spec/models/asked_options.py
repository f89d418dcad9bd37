"""The single declaration of each option for opening a model.

It makes the arguments of `edge_spec.load`, the command line's options and the table in docs/cli.md;
the loader reads its fields. Wrong types are refused, misspelled names get a suggestion. Import
nothing heavy here: every `--help` does.
"""

from __future__ import annotations

import inspect
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import EnumType
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from edge_spec.core.modes import DraftOverlap, JacobiInit, LosslessMode
from edge_spec.core.sampling_params import is_number, is_whole
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.core.model import Progress

_ALIKE = 0.6  # similarity of names from which one may be meant
_KINDS: Mapping[Any, Callable[[Any], bool]] = {  # others use isinstance
    int: is_whole,
    float: is_number,
    Path: lambda value: isinstance(value, os.PathLike),
}
LLAMACPP = "llama.cpp"
_LLAMACPP = ("llamacpp",)
ENDPOINT = "HOST:PORT"
RPC_HELP = "A server of llama.cpp whose devices are used, too; may be repeated."
MODEL_HELP = (
    "A GGUF file, a Hugging Face directory, a bundle or pair bundle, hf:org/name[:file], or "
    "smollm2."
)
_OPTION = "option"


@dataclass(frozen=True)
class Option:
    """An option's description and support; a dataclass field."""

    help: str  # for `--help`, `load`'s docstring and docs/cli.md
    panel: str | None = None  # of `--help`; None: the unnamed one
    own_flag: str = ""  # else the field's name with dashes, without "_s"
    metavar: str | None = None  # for its value, if the type does not give it
    envvar: str | None = None  # environment variable, below the command line
    least: float | None = None  # smallest number allowed
    most: float | None = None
    read_as: Any = None  # type on the command line, if not the field's
    more: str = ""  # added in docs/cli.md, as Markdown
    runtimes: tuple[str, ...] = ()  # the only ones that support it
    # Our drafters that use it; a refusal names the first. `DrafterTraits.options` decides whether
    # it is used; if not, it is refused.
    drafters: tuple[str, ...] = ()
    in_auto: bool = False  # --drafter auto uses it too
    name: str = ""  # this and the following come from the field: see `declared_options`
    type: Any = None
    default: Any = None

    @property
    def flag(self) -> str:
        return self.own_flag or f"--{self.name.removesuffix('_s').replace('_', '-')}"

    @property
    def is_in_seconds(self) -> bool:
        return self.name.endswith("_s")

    @property
    def value_name(self) -> str:
        """Return the placeholder of the value in help and docs; "" if the type suggests none."""
        if self.metavar:
            return self.metavar
        types = {self.read_as, *get_args(self.read_as)}
        types |= {inner for each in types for inner in get_args(each)}
        for choices in types:
            if isinstance(choices, EnumType):
                return "|".join(choices)
        if int in types:
            return "N"
        if float in types:
            return "SECONDS" if self.is_in_seconds else "NUMBER"
        return "PATH" if Path in types else ""

    @property
    def command_line_default(self) -> Any:
        """Return None for a list: nothing was given."""
        if self.default == ():
            return None
        is_choice = isinstance(self.read_as, EnumType)
        return self.read_as(self.default) if is_choice else self.default

    def from_command_line(self, value: Any) -> Any:
        if value is None:
            return self.default
        return tuple(value) if isinstance(value, list) else value


def option(
    default: Any,
    help: str,
    panel: str | None = None,
    *,
    flag: str = "",
    repr: bool = True,
    **more: Any,
) -> Any:
    """Declare a field with its default. more: fields of `Option`."""
    declared = Option(help, panel, own_flag=flag, **more)
    return field(default=default, repr=repr, metadata={_OPTION: declared})


model_option = partial(option, panel="Model and drafting")
rare_option = partial(option, panel="Advanced")


@cache
def declared_options(group: type) -> Mapping[str, Option]:
    """Return the group's options by name, in field order."""
    hints = get_type_hints(group)
    found = {}
    for each in fields(group):
        if (declared := each.metadata.get(_OPTION)) is not None:
            taken = hints[each.name]
            found[each.name] = replace(
                declared,
                name=each.name,
                type=taken,
                default=each.default,
                read_as=taken if declared.read_as is None else declared.read_as,
            )
    return MappingProxyType(found)  # cached, so nobody may change it


def require_type(name: str, value: Any, taken: Any, help: str = "") -> None:
    """Raise UsageError, with the option's help, unless the value has the type `taken`."""
    if not _is_of(value, taken):
        raise UsageError(
            f"{name} is {reprlib.repr(value)}",
            remedy=f"It takes {inspect.formatannotation(taken)}. {help}".rstrip(),
        )


def _is_of(value: Any, taken: Any) -> bool:
    origin = get_origin(taken)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(taken))
    if origin is Sequence:  # a string is a sequence too, but never meant as one
        (item,) = get_args(taken)
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_is_of(each, item) for each in value)
    if taken in _KINDS:
        return _KINDS[taken](value)
    is_function = origin is not None and issubclass(origin, Callable)  # type: ignore[arg-type]
    return callable(value) if is_function else isinstance(value, origin or taken)


def meant(name: str, names: Iterable[str], others: Mapping[str, str]) -> str | None:
    """Return the name that is meant: another spelling, a key of `others`, or the closest match;
    None if nothing is close."""
    plain = _plain(name)
    known = {_plain(each): each for each in names}
    every = {_plain(other): each for other, each in others.items()} | known
    if plain in every:
        return every[plain]
    near = get_close_matches(plain, known, n=1, cutoff=_ALIKE)
    near = near or get_close_matches(plain, every, n=1, cutoff=_ALIKE)
    return every[near[0]] if near else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """What a user asked for, unchanged."""

    runtime: str = model_option(
        "auto",
        "auto, or an installed runtime: ort, llamacpp, openvino, coreai, coreml, reference.",
        more="[models.md](models.md#runtimes) compares them.",
    )
    device: str | None = model_option(
        None,
        "Where the model runs: names from edge-spec devices, joined by commas.",
        more="Such as `cpu` or `cuda0`: [models.md](models.md#devices).",
    )
    threads: int | None = model_option(None, "CPU threads of the model.")
    context_length: int | None = model_option(
        None,
        "Tokens of context, if not the model's own.",
        flag="--context",
    )
    draft_runtime: str = rare_option("auto", "The draft's runtime.")
    draft_device: str | None = rare_option(None, "Where the draft runs.")
    draft_threads: int | None = rare_option(None, "CPU threads of the draft, if not the model's.")
    gpu_layers: int | str | None = option(
        None,
        "Layers that leave the CPU: a number, or auto, as many as fit.",
        LLAMACPP,
        metavar="N",
        read_as=str | None,
        more="[models.md](models.md#runtimes).",
        runtimes=_LLAMACPP,
    )
    kv_type: str | None = option(
        None,
        "How the cache is stored: f16, f32, q8_0, q4_0.",
        LLAMACPP,
        runtimes=_LLAMACPP,
    )
    mmap: bool | None = option(
        None, "Leave the weights in their file.", LLAMACPP, runtimes=_LLAMACPP
    )
    flash_attention: bool | None = option(
        None,
        "Attend in blocks; on unless turned off.",
        LLAMACPP,
        runtimes=_LLAMACPP,
    )
    rpc: Sequence[str] = option(
        (),
        RPC_HELP,
        LLAMACPP,
        metavar=ENDPOINT,
        read_as=list[str] | None,
        more="[models.md](models.md#devices).",
        runtimes=_LLAMACPP,
    )
    drafter: str = model_option(
        "auto",
        "auto, none, or names joined by commas: suffix, recycling, lookahead, jacobi, corpus, "
        "answers, draft-model, cascade, eagle, medusa, dflash, assistant, early-exit, "
        "layer-skip.",
        more="[drafters.md](drafters.md) says what each does and `auto` chooses.",
    )
    draft: str | Sequence[str] | None = model_option(
        None,
        "A smaller model or a trained head, none, or auto: a model that fits and is here; may "
        "be repeated: each one more drafts for the one before.  [default: a pair bundle's own]",
        read_as=list[str] | None,
        more="[models.md](models.md#choose-a-draft), [drafters.md](drafters.md#trained-heads).",
    )
    draft_overlap: str = rare_option(
        "auto",
        "Draft while the model verifies: auto where devices differ.",
        read_as=DraftOverlap,
        more="[drafters.md](drafters.md#draft-models).",
    )
    draft_n_max: int | None = rare_option(
        None,
        "Most tokens drafted a round.",
        more="Without it, 15.",
    )
    exit_layer: int | None = rare_option(
        None,
        "Layers that early exit keeps.",
        more="Without it, those that `tune-skip` found.",
        drafters=("early-exit",),
    )
    corpora: Sequence[str | Path] = model_option(
        (),
        "Texts that answers may quote: a file or directory; may be repeated.",
        flag="--corpus",
        read_as=list[Path] | None,
        more="Read and sorted at each start.",
        drafters=("corpus",),
        in_auto=True,
    )
    remember: bool = model_option(
        False,
        "Draft from what earlier requests wrote, which is kept on this machine.",
        flag="--remember",
        more="Up to 250,000 tokens a model; `edge-spec learn forget` removes them: "
        "[drafters.md](drafters.md#what-is-kept).",
        drafters=("answers",),
        in_auto=True,
    )
    lookahead: str | None = rare_option(
        None,
        "Columns, n-gram length and draft tokens of the lookahead window.",
        metavar="W,N,G",
        more="Without it, 2,3,2.",
        drafters=("lookahead",),
    )
    jacobi: str | None = rare_option(
        None,
        "How Jacobi's initial tokens are made.",
        read_as=JacobiInit | None,
        more="Without it, `ngram`.",
        drafters=("jacobi",),
    )
    lossless: str = model_option(
        "auto",
        "auto: bit-identical to plain decoding wherever that is cheap; always; ties: never "
        "slowed down for near ties.",
        read_as=LosslessMode,
        more="[how-it-works.md](how-it-works.md#losslessness).",
    )
    exact: bool = model_option(False, "The same as --lossless always.", flag="--exact")
    parallel_rows: int | None = rare_option(
        None,
        "Most rows that all conversations together score, a pass.",
        more="Without it, as many as pay.",
    )
    prompt_cache: str | Path | None = rare_option(  # noqa: RUF009
        None,
        "Keep what was read of long prompts on disk: auto, or a directory.",
        read_as=str | None,
        metavar="DIRECTORY",
        more="Up to 4 GB; `auto` is `prompts/` in the cache directory: "
        "[use.md](use.md#long-prompts).",
    )
    parse_special: bool = rare_option(
        False,
        "Read control tokens in messages, too; else their text stays text.",
        flag="--parse-special",
        more="Prompts without a template always have them read: "
        "[reliability.md](reliability.md#control-tokens-stay-text).",
    )
    source_language: str | None = rare_option(
        None,
        "The language that a translator of many languages reads, as its vocabulary names it.",
        metavar="NAME",
        more="Such as `eng_Latn`: [families.md](families.md#translators).",
    )
    target_language: str | None = rare_option(
        None,
        "The language that it writes, such as fra_Latn.",
        metavar="NAME",
        more="Without it, the one that the model's files force.",
    )
    call_timeout_s: float | None = rare_option(
        None,
        "Seconds that a pass of the model may take before it is given up.",
        more="[reliability.md](reliability.md#the-target). Not with `early-exit` and `layer-skip`.",
    )

    @property
    def named_drafts(self) -> tuple[str, ...] | None:
        """Return the drafts as given, the first for the target, each further one for the one
        before; None if not given."""
        if self.draft is None:
            return None
        return (self.draft,) if isinstance(self.draft, str) else tuple(self.draft)


@dataclass(frozen=True)
class LoadArguments(AskedOptions):
    """Arguments of `edge_spec.load`."""

    model: str | Path = "smollm2"
    _: KW_ONLY
    progress: Progress | None = None

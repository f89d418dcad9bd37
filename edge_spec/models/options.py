"""Complete and check a user's options for opening a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_spec.core.endpoint import Endpoint
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.modes import (
    DEFAULT_DRAFT_TOKENS,
    DraftOverlap,
    JacobiInit,
    LosslessMode,
    parse_mode,
)
from edge_spec.drafters import factory
from edge_spec.drafters.factory import missing_draft, missing_head
from edge_spec.drafters.jacobi import WindowSize
from edge_spec.drafters.protocol import Cost
from edge_spec.errors import UsageError
from edge_spec.models.asked_options import AskedOptions, declared_options
from edge_spec.storage.atomic import cache_directory, expanded


@dataclass(frozen=True, kw_only=True)
class LoadOptions(AskedOptions):
    """Checked options; `draft` names models, no longer "auto" or "none". Raises UsageError for
    values out of range and contradictions."""

    quantization: str | None = None  # of a model that needs conversion
    keeps_answers: bool = True  # for later runs, with the answers drafter
    head: Path | None = None  # directory of a trained head that `draft` named

    def __post_init__(self) -> None:
        for is_wrong, what, remedy in _problems(self):
            if is_wrong:
                raise UsageError(what, remedy=remedy)

    @property
    def export(self) -> ExportOptions:
        return ExportOptions(self.quantization)

    @property
    def providers(self) -> tuple[str, ...]:
        return _split(self.device)

    @property
    def draft_providers(self) -> tuple[str, ...]:
        return _split(self.draft_device)

    @property
    def drafts(self) -> tuple[str, ...]:
        return self.named_drafts or ()

    @property
    def window(self) -> WindowSize | None:
        return None if self.lookahead is None else WindowSize.parse(self.lookahead)

    @property
    def fill(self) -> JacobiInit | None:
        return None if self.jacobi is None else parse_mode(JacobiInit, self.jacobi, "--jacobi")

    @property
    def num_gpu_layers(self) -> int | None:
        """Return None for as many as fit. Raises UsageError."""
        if self.gpu_layers in (None, "auto"):
            return None
        try:
            return int(self.gpu_layers)
        except ValueError:
            raise UsageError(
                f"gpu-layers is {self.gpu_layers}", remedy="It has to be a number or auto."
            ) from None

    @property
    def overlap(self) -> DraftOverlap:
        return parse_mode(DraftOverlap, self.draft_overlap, "--draft-overlap")

    @property
    def lossless_mode(self) -> LosslessMode:
        mode = parse_mode(LosslessMode, self.lossless, "--lossless")
        return LosslessMode.ALWAYS if self.exact else mode

    @property
    def prompt_directory(self) -> Path | None:
        if self.prompt_cache is None:
            return None
        if self.prompt_cache == "auto":
            return cache_directory() / "prompts"
        return expanded(Path(self.prompt_cache))

    @property
    def most_rows(self) -> int:
        """Return the rows of a round if drafters find enough."""
        window = self.window
        return 1 + max(
            DEFAULT_DRAFT_TOKENS if self.draft_n_max is None else self.draft_n_max,
            window.num_rows - 1 if window else 0,
        )

    @property
    def takes_turns(self) -> bool:
        """Return whether other models or parts run between its passes."""
        named = factory.traits_of(self.drafter).values()
        several = bool(self.drafts) or self.head is not None
        return several or any(traits.cost is Cost.PASS for traits in named)

    @property
    def runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(
            threads=self.threads,
            providers=self.providers,
            context_length=self.context_length,
            gpu_layers=self.num_gpu_layers,
            kv_type=self.kv_type,
            mmap=self.mmap,
            flash_attention=self.flash_attention,
            takes_turns=self.takes_turns,
            rpc_servers=tuple(self.rpc),
        )

    @property
    def draft_runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(
            threads=self.draft_threads or self.threads,
            providers=self.draft_providers,
            context_length=self.context_length,
            takes_turns=True,
            prefers_cpu=True,  # the target has the device to itself
            may_hold_less=True,  # longer texts continue without the draft
        )


def _split(joined: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in joined.split(",")) if joined else ()


_Problem = tuple[bool, str, str]  # is wrong, message, remedy
_ONE_OR_MORE = ("threads", "draft_threads", "context_length", "parallel_rows")
_DROP_ONE = "Leave one of them out."


def _problems(options: LoadOptions) -> Iterator[_Problem]:
    """Raises UsageError for values that cannot be parsed."""
    window, most, directory = options.window, options.draft_n_max, options.prompt_directory
    _ = options.fill, options.overlap
    yield (
        most is not None and most < 1,
        f"the largest number of draft tokens is {most}",
        "It has to be 1 or more; --drafter none turns drafting off.",
    )
    for name in _ONE_OR_MORE:
        value = getattr(options, name)
        flag = declared_options(AskedOptions)[name].flag.removeprefix("--")
        yield value is not None and value < 1, f"{flag} is {value}", "It has to be 1 or more."
    timeout = options.call_timeout_s
    above = "It has to be above 0 seconds."
    # also rejects NaN
    yield timeout is not None and not timeout > 0, f"call-timeout is {timeout}", above
    yield from _unused(options)
    yield from _draft_problems(options)
    _ = options.lossless_mode
    is_ties = options.lossless == LosslessMode.TIES
    yield options.exact and is_ties, "--exact contradicts --lossless ties", _DROP_ONE
    wanted = window.num_rows - 1 if window else 0
    yield (
        most is not None and most < wanted,
        f"a lookahead window of {window} drafts up to {wanted} tokens a round, "
        f"and at most {most} are allowed",
        "Choose a smaller window or a larger --draft-n-max.",
    )
    yield (
        directory is not None and directory.exists() and not directory.is_dir(),
        f"{directory} is no directory, so prompts cannot be kept there",
        "Give --prompt-cache auto or a directory.",
    )
    layers = options.num_gpu_layers
    yield (layers or 0) < 0, f"gpu-layers is {options.gpu_layers}", "It has to be 0 or more."
    # A device left without work would silently do nothing.
    servers = {Endpoint.parse(server) for server in options.rpc}
    yield len(servers) < len(options.rpc), "--rpc names a server twice", "Name each once."
    device = f"--device {','.join(options.providers)}"
    on_cpu = {name.lower() for name in options.providers} == {"cpu"}
    said = f"--gpu-layers {options.gpu_layers}"
    yield on_cpu and bool(layers), f"{device} contradicts {said}", _DROP_ONE
    yield on_cpu and bool(servers), f"{device} contradicts --rpc", _DROP_ONE
    yield options.gpu_layers == 0 and bool(servers), f"{said} contradicts --rpc", _DROP_ONE


def _unused(options: LoadOptions) -> Iterator[_Problem]:
    """Options for other drafters would silently do nothing."""
    asked = factory.traits_of(options.drafter).values()
    auto = options.drafter.strip() == "auto"
    told = [("draft", "--draft", "draft-model", True), ("head", "--draft", "eagle", True)]
    for name, option in declared_options(AskedOptions).items():
        if option.drafters:
            told.append((name, option.flag, option.drafters[0], option.in_auto))
    for name, flag, example, in_auto in told:
        used = any(traits.uses(name) for traits in asked) or (auto and in_auto)
        yield (
            bool(getattr(options, name)) and not used,
            f"{flag} would not be used by --drafter {options.drafter}",
            f"Add {example} to --drafter, or leave the option out.",
        )


def _draft_problems(options: LoadOptions) -> Iterator[_Problem]:
    """Raises UsageError for a drafter without its draft or head."""
    if options.drafts:
        has_both = options.head is not None
        yield has_both, f"the head {options.head} drafts without other drafts", _DROP_ONE
        return
    remedy = "Name one with --draft, or leave the option out."
    for flag, given in (
        ("--draft-threads", options.draft_threads is not None),
        ("--draft-overlap on", options.overlap is DraftOverlap.ON),
    ):
        yield given, f"{flag} is for a draft, and there is none", remedy
    for name, traits in factory.traits_of(options.drafter).items():
        if traits.draft_model:
            raise missing_draft(name)
        if traits.head and options.head is None:
            raise missing_head(name)

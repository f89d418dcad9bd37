"""Completes and checks the options that a user gave to open a model with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_spec.control.policy import DEFAULT_DRAFT_TOKENS
from edge_spec.core.endpoint import Endpoint
from edge_spec.core.model import RuntimeOptions
from edge_spec.drafters import factory
from edge_spec.drafters.factory import missing_draft, missing_head
from edge_spec.drafters.jacobi import JacobiInit, WindowSize
from edge_spec.drafters.protocol import Cost
from edge_spec.errors import UsageError
from edge_spec.exactness.sharing import LosslessMode
from edge_spec.models.asked_options import (
    AskedDecoding,
    AskedDrafting,
    AskedOptions,
    AskedPlace,
)
from edge_spec.models.device_names import DraftOverlap, share_chip
from edge_spec.models.option import declared_options
from edge_spec.storage.atomic import cache_directory, expanded


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Says how a model is converted that no runtime reads as it is."""

    quantization: str | None = None
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(AskedPlace):
    """Says where models run."""

    @property
    def providers(self) -> tuple[str, ...]:
        return device_names(self.device)

    @property
    def draft_providers(self) -> tuple[str, ...]:
        return device_names(self.draft_device)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(AskedDrafting):
    """Says who drafts; `draft` names models, no longer "auto" or "none"."""

    keeps_answers: bool = True  # for later runs, where answers is a drafter
    head: Path | None = None  # the directory of a trained one, which `draft` named

    @property
    def drafts(self) -> tuple[str, ...]:
        """Smaller models, named like the target: the first drafts for it, each other one for the
        one before."""
        return (self.draft,) if isinstance(self.draft, str) else tuple(self.draft or ())

    @property
    def window(self) -> WindowSize | None:
        """Returns the window of lookahead; None for its default."""
        return None if self.lookahead is None else WindowSize.parse(self.lookahead)

    @property
    def fill(self) -> JacobiInit | None:
        """Returns how Jacobi's initial tokens are made; None for its default."""
        return None if self.jacobi is None else JacobiInit.parse(self.jacobi)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ConversionOptions, AskedDecoding, DraftingOptions, PlaceOptions):
    """All of them. A stage of the loader is given it as the part that it may read.

    Raises UsageError for values that are out of range or contradict each other.
    """

    def __post_init__(self) -> None:
        _require_in_range(self)
        _require_used(self)
        _require_draft(self)
        _require_one_mode(self)
        _require_room_for_window(self)
        _require_prompt_directory(self)
        if (self.num_gpu_layers or 0) < 0:
            raise UsageError(f"gpu-layers is {self.gpu_layers}", remedy="It has to be 0 or more.")
        _require_consistent_devices(self)

    @property
    def num_gpu_layers(self) -> int | None:
        """Returns None for as many as fit. Raises UsageError."""
        if self.gpu_layers in (None, "auto"):
            return None
        try:
            return int(self.gpu_layers)
        except ValueError:
            raise UsageError(
                f"gpu-layers is {self.gpu_layers}", remedy="It has to be a number or auto."
            ) from None

    @property
    def drafts_elsewhere(self) -> bool:
        """Says whether drafts run on a device that the target does not use, judging by names."""
        targets = set(self.providers) or {"gpu" if self.num_gpu_layers or self.rpc else "cpu"}
        return bool(self.drafts) and not share_chip(targets, self.draft_providers or ("cpu",))

    @property
    def overlap(self) -> DraftOverlap:
        """Says whether the first draft goes on while the target verifies; AUTO: if it pays."""
        overlap = DraftOverlap.parse(self.draft_overlap)
        if overlap is DraftOverlap.AUTO and not self.drafts_elsewhere:
            return DraftOverlap.OFF
        return overlap

    @property
    def lossless_mode(self) -> LosslessMode:
        return LosslessMode.ALWAYS if self.exact else LosslessMode.parse(self.lossless)

    @property
    def prompt_directory(self) -> Path | None:
        """Returns where long prompts are kept; None if they are not."""
        if self.prompt_cache is None:
            return None
        if self.prompt_cache == "auto":
            return cache_directory() / "prompts"
        return expanded(Path(self.prompt_cache))

    @property
    def most_rows(self) -> int:
        """Returns the rows of a round if drafters find enough."""
        window = self.window
        return 1 + max(
            DEFAULT_DRAFT_TOKENS if self.draft_n_max is None else self.draft_n_max,
            window.num_rows - 1 if window else 0,
        )

    @property
    def anticipates(self) -> bool:
        """Says whether the first draft ever goes on while the target verifies."""
        return self.overlap is not DraftOverlap.OFF

    @property
    def takes_turns(self) -> bool:
        """Says whether other models, or parts of this one, run between its passes."""
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
            prefers_cpu=True,  # beside a target that has the device to itself
            may_hold_less=True,  # longer texts go on without it
        )


def device_names(joined: str | None) -> tuple[str, ...]:
    """Splits names that are joined by commas."""
    return tuple(name.strip() for name in joined.split(",")) if joined else ()


def _require_in_range(options: LoadOptions) -> None:
    _ = options.window, options.fill, options.overlap  # each raises where it cannot be read
    if options.draft_n_max is not None and options.draft_n_max < 1:
        raise UsageError(
            f"the largest number of draft tokens is {options.draft_n_max}",
            remedy="It has to be 1 or more; --drafter none turns drafting off.",
        )
    for name, value in (
        ("threads", options.threads),
        ("draft-threads", options.draft_threads),
        ("context", options.context_length),
        ("parallel-rows", options.parallel_rows),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}", remedy="It has to be 1 or more.")
    if options.call_timeout_s is not None and not options.call_timeout_s > 0:  # NaN, too
        raise UsageError(
            f"call-timeout is {options.call_timeout_s}", remedy="It has to be above 0 seconds."
        )


def _require_used(options: LoadOptions) -> None:
    """An option for a drafter that was not asked for would silently do nothing."""
    factory.require_current_names(options.drafter)
    asked = factory.traits_of(options.drafter).values()
    auto = options.drafter.strip() == "auto"
    told = [
        ("draft", f"the draft {', '.join(options.drafts)}", "draft-model", True),
        ("head", f"the head {options.head}", "eagle", True),
    ]
    for name, declared in declared_options(AskedOptions).items():
        option = declared.option
        if option.drafters:
            told.append((name, option.noun, option.drafters[0], option.in_auto))
    for name, noun, example, in_auto in told:
        used = any(traits.uses(name) for traits in asked) or (auto and in_auto)
        if getattr(options, name) and not used:
            raise UsageError(
                f"{noun} would not be used by --drafter {options.drafter}",
                remedy=f"Add {example} to --drafter, or leave the option out.",
            )


def _require_one_mode(options: LoadOptions) -> None:
    if options.exact and LosslessMode.parse(options.lossless) is LosslessMode.TIES:
        raise UsageError("--exact contradicts --lossless ties", remedy="Leave one of them out.")
    _ = options.lossless_mode  # raises where it cannot be read


def _require_draft(options: LoadOptions) -> None:
    if options.drafts and options.head is not None:
        raise UsageError(
            f"the head {options.head} drafts without other drafts", remedy="Leave one of them out."
        )
    if options.drafts:
        return
    for flag, given in (
        ("--draft-threads", options.draft_threads is not None),
        ("--draft-overlap on", options.overlap is DraftOverlap.ON),
    ):
        if given:
            raise UsageError(
                f"{flag} is for a draft, and there is none",
                remedy="Name one with --draft, or leave the option out.",
            )
    for name, traits in factory.traits_of(options.drafter).items():
        if traits.draft_model:
            raise missing_draft(name)
        if traits.head and options.head is None:
            raise missing_head(name)


def _require_room_for_window(options: LoadOptions) -> None:
    window = options.window
    if window is None or options.draft_n_max is None:
        return
    wanted = window.num_rows - 1
    if options.draft_n_max < wanted:
        raise UsageError(
            f"a lookahead window of {window} drafts up to {wanted} tokens a round, "
            f"and at most {options.draft_n_max} are allowed",
            remedy="Choose a smaller window or a larger --draft-n-max.",
        )


def _require_prompt_directory(options: LoadOptions) -> None:
    directory = options.prompt_directory
    if directory is not None and directory.exists() and not directory.is_dir():
        raise UsageError(
            f"{directory} is no directory, so prompts cannot be kept there",
            remedy="Give --prompt-cache auto or a directory.",
        )


def _require_consistent_devices(options: LoadOptions) -> None:
    """Devices that the rest of the options leave nothing for would silently do nothing."""
    servers = {Endpoint.parse(server) for server in options.rpc}
    if len(servers) < len(options.rpc):
        raise UsageError("--rpc names a server twice", remedy="Name each once.")
    providers = options.providers
    on_cpu = bool(providers) and {name.lower() for name in providers} == {"cpu"}
    device = f"--device {','.join(providers)}"
    layers = f"--gpu-layers {options.gpu_layers}"
    for first, second, contradict in (
        (device, layers, on_cpu and bool(options.num_gpu_layers)),
        (device, "--rpc", on_cpu and bool(servers)),
        (layers, "--rpc", options.gpu_layers == 0 and bool(servers)),
    ):
        if contradict:
            raise UsageError(f"{first} contradicts {second}", remedy="Leave one of them out.")

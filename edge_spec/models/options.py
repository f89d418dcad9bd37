"""What a user can choose when a model is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_spec.control.overlap import DraftOverlap
from edge_spec.core.endpoint import Endpoint
from edge_spec.core.model import RuntimeOptions
from edge_spec.drafters import factory
from edge_spec.drafters.factory import missing_draft
from edge_spec.drafters.jacobi.jacobi_init import JacobiInit
from edge_spec.drafters.jacobi.lookahead import WindowSize
from edge_spec.drafters.protocol import Cost
from edge_spec.errors import UsageError


@dataclass(frozen=True)
class LoadOptions:
    """What `load` composes; "auto" leaves the choice to edge-spec."""

    runtime: str = "auto"
    drafter: str = "auto"  # "auto", "none", or names joined by commas
    drafts: tuple[str, ...] = ()  # smaller models, named like the target: the first drafts for it,
    # each other one for the one before
    draft_runtime: str = "auto"
    draft_providers: tuple[str, ...] = ()
    draft_threads: int | None = None  # None: as many as the target
    draft_overlap: DraftOverlap = DraftOverlap.AUTO  # drafting while the target verifies
    draft_n_max: int | None = None  # drafted tokens a round; None: the policy's default
    corpora: tuple[Path, ...] = ()  # texts that answers may quote, or their indices
    keeps_ngrams: bool = True  # of answers, for later runs, where ngram-cache is a drafter
    exit_layer: int | None = None  # of early exit; None: searched
    window: WindowSize | None = None  # of lookahead; None: its default
    fill: JacobiInit | None = None  # how Jacobi's initial tokens are made; None: its default
    quantization: str | None = None  # of a model that has to be converted
    block_size: int | None = None
    exact: bool = False  # bit-identical to plain decoding in the same mode
    parallel_rows: int | None = None  # that all conversations on one target may score together,
    # a pass; None: as many as pay
    call_timeout_s: float | None = None  # of a pass of the target; None: it may take for ever
    threads: int | None = None
    providers: tuple[str, ...] = ()
    context_length: int | None = None  # tokens; None: what the model was trained for
    # Of the target:
    gpu_layers: int | None = None
    kv_type: str | None = None
    mmap: bool | None = None
    flash_attention: bool | None = None
    rpc_servers: tuple[str, ...] = ()  # host:port
    plan: Path | None = None  # of `edge-spec plan`, which decides where models run and who drafts

    def __post_init__(self) -> None:
        if self.draft_n_max is not None and self.draft_n_max < 1:
            raise UsageError(
                f"the largest number of draft tokens is {self.draft_n_max}",
                remedy="It has to be 1 or more; --drafter none turns drafting off.",
            )
        for name, value in (
            ("threads", self.threads),
            ("draft-threads", self.draft_threads),
            ("context", self.context_length),
            ("parallel-rows", self.parallel_rows),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", remedy="It has to be 1 or more.")
        if self.call_timeout_s is not None and not self.call_timeout_s > 0:  # NaN, too
            raise UsageError(
                f"call-timeout is {self.call_timeout_s}", remedy="It has to be above 0 seconds."
            )
        self._require_used()
        if self.gpu_layers is not None and self.gpu_layers < 0:
            raise UsageError(f"gpu-layers is {self.gpu_layers}", remedy="It has to be 0 or more.")
        self._require_consistent_devices()

    def _require_used(self) -> None:
        """An option for a drafter that was not asked for would silently do nothing."""
        named = factory.traits_of(self.drafter)
        auto = self.drafter.strip() == "auto"
        for described, option, example, in_auto in (
            (f"the draft {', '.join(self.drafts)}", "drafts", "draft-model", True),
            ("the corpus", "corpora", "corpus", True),
            ("the exit layer", "exit_layer", "early-exit", False),
            ("the lookahead window", "window", "lookahead", False),
            ("the initial tokens of Jacobi", "fill", "jacobi", False),
        ):
            used = any(traits.uses(option) for traits in named.values()) or (auto and in_auto)
            if getattr(self, option) and not used:
                raise UsageError(
                    f"{described} would not be used by --drafter {self.drafter}",
                    remedy=f"Add {example} to --drafter, or leave the option out.",
                )
        for option, given in (
            ("--draft-threads", self.draft_threads is not None),
            ("--draft-overlap on", self.draft_overlap is DraftOverlap.ON),
        ):
            if given and not self.drafts:
                raise UsageError(
                    f"{option} is for a draft, and there is none",
                    remedy="Name one with --draft, or leave the option out.",
                )
        for name, traits in named.items():
            if traits.draft_model and not self.drafts:
                raise missing_draft(name)
        if self.window is not None and self.draft_n_max is not None:
            wanted = self.window.num_rows - 1
            if self.draft_n_max < wanted:
                raise UsageError(
                    f"a lookahead window of {self.window} drafts up to {wanted} tokens a round, "
                    f"and at most {self.draft_n_max} are allowed",
                    remedy="Choose a smaller window or a larger --draft-n-max.",
                )

    def _require_consistent_devices(self) -> None:
        """Devices that the rest of the options leave nothing for would silently do nothing."""
        servers = {Endpoint.parse(server) for server in self.rpc_servers}
        if len(servers) < len(self.rpc_servers):
            raise UsageError("--rpc names a server twice", remedy="Name each once.")
        on_cpu = bool(self.providers) and {name.lower() for name in self.providers} == {"cpu"}
        device = f"--device {','.join(self.providers)}"
        layers = f"--gpu-layers {self.gpu_layers}"
        for first, second, contradict in (
            (device, layers, on_cpu and bool(self.gpu_layers)),
            (device, "--rpc", on_cpu and bool(servers)),
            (layers, "--rpc", self.gpu_layers == 0 and bool(servers)),
        ):
            if contradict:
                raise UsageError(f"{first} contradicts {second}", remedy="Leave one of them out.")

    @property
    def drafts_elsewhere(self) -> bool:
        """Whether drafts run on a device that the target does not use."""
        targets = set(self.providers) or {"gpu" if self.gpu_layers or self.rpc_servers else "cpu"}
        return bool(self.drafts) and targets.isdisjoint(self.draft_providers or ("cpu",))

    @property
    def anticipates(self) -> bool:
        """Whether the first draft goes on while the target verifies."""
        if self.draft_overlap is DraftOverlap.AUTO:
            return self.drafts_elsewhere
        return self.draft_overlap is DraftOverlap.ON

    @property
    def takes_turns(self) -> bool:
        """Whether other models, or parts of this one, run between its passes."""
        named = factory.traits_of(self.drafter).values()
        return bool(self.drafts) or any(traits.cost is Cost.PASS for traits in named)

    @property
    def runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(
            threads=self.threads,
            providers=self.providers,
            context_length=self.context_length,
            gpu_layers=self.gpu_layers,
            kv_type=self.kv_type,
            mmap=self.mmap,
            flash_attention=self.flash_attention,
            takes_turns=self.takes_turns,
            rpc_servers=self.rpc_servers,
        )

    @property
    def draft_runtime_options(self) -> RuntimeOptions:
        return RuntimeOptions(
            threads=self.draft_threads or self.threads,
            providers=self.draft_providers,
            context_length=self.context_length,
            takes_turns=True,
        )


def device_names(joined: str | None) -> tuple[str, ...]:
    """Of names joined by commas."""
    return tuple(name.strip() for name in joined.split(",")) if joined else ()

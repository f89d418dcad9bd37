"""What `edge-spec plan` finds of a model or a pair: where it can run, best first, and how fast it
writes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from edge_spec.models.memory import MAIN, Bytes, shortage
from edge_spec.models.options import LoadOptions

USUAL_DRAFT_TOKENS = 4
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Place:
    """A runtime, its device and settings for one model."""

    runtime: str
    device: str
    threads: Annotated[int, Field(ge=1)] | None  # None: the runtime's choice
    weights: str  # as they are stored, such as "int4 block 32"
    library: str  # the version of the runtime's library
    kernels: str = ""  # in the place of the library's own

    def __str__(self) -> str:
        if self.threads is None:
            return f"{self.runtime} {self.device}"
        return f"{self.runtime} {self.device} {self.threads} thread{'s' * (self.threads > 1)}"


@dataclass(frozen=True)
class Placement:
    """One way to run a model, with its rate.

    drafter: as after --drafter; "none" is no speculation. step_s: of plain decoding at its place,
    by passes; None where the model was not opened, since it does not fit. pair_step_s: of a step
    with USUAL_DRAFT_TOKENS of the draft, by what each model takes alone; None where one of the two
    does not fit by itself.
    tokens_per_s: as short texts were written here where there is a `speedup`, over plain decoding
    beside them; else of plain steps, None for a draft that was not tried. memory_bytes: of all its
    models with PLANNED_TOKENS of text, None where a runtime cannot tell; on_devices: in devices'
    own memory, by their labels in a `Forecast`.
    """

    target: Place
    draft: Place | None
    drafter: str
    tokens_per_s: _Rate | None = None
    speedup: _Rate | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None  # of verified draft tokens
    memory_bytes: int | None = None
    reason: str = ""  # why it is not the first
    lossless: str = ""  # what holds for texts there by default, where that is known
    # KL divergence of the weights there from those they were converted from, nats a token.
    loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    on_devices: Mapping[str, int] = field(default_factory=dict)
    step_s: _Rate | None = None
    pair_step_s: _Rate | None = None

    @property
    def plain_s(self) -> float:
        """Return the seconds in which plain decoding writes as many tokens as a step of the pair,
        if all its draft tokens are right."""
        return (USUAL_DRAFT_TOKENS + 1) * (self.step_s or 0.0)

    @property
    def can_pay(self) -> bool:
        """Return whether such a step is faster than plain decoding."""
        return self.pair_step_s is not None and self.pair_step_s < self.plain_s

    def shortage(self, free: Bytes) -> str | None:
        """Say where what is free does not do: "500 MB of 400 MB free", with the device if it is
        one's own memory. None where it does, or where that is not known."""
        return shortage({MAIN: self.memory_bytes or 0, **self.on_devices}, free)

    def options(self, draft: str | None) -> LoadOptions:
        """Return the options that open it. draft: the model that drafts, where it has one."""
        pair: dict[str, Any] = {}
        if self.draft is not None and draft is not None:
            pair = {
                "draft": (draft,),
                "draft_runtime": self.draft.runtime,
                "draft_device": self.draft.device,
                "draft_threads": self.draft.threads,
            }
        return LoadOptions(
            runtime=self.target.runtime,
            device=self.target.device,
            threads=self.target.threads,
            drafter=self.drafter,
            **pair,
        )

    def __str__(self) -> str:
        draft = "" if self.draft is None else f", draft on {self.draft}"
        return f"{self.target}{draft}, drafter {self.drafter}"


@dataclass(frozen=True)
class Plan:
    """Placements, the best first. notes: a line for each place or drafter that cannot be used, and
    for what is uncertain."""

    model: str
    draft: str | None  # as the user named it
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = ()
    in_force: tuple[str, ...] = ()  # what a start runs by now, who drafts and why

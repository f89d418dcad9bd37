"""What `edge-spec accept` was asked to try, as it is handed to the processes that try it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from edge_spec.core.model import Model
from edge_spec.engine.engine import Engine
from edge_spec.fitting.devices import Device, devices_of
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source


def silent(what: str, fraction: float) -> None:
    """A `Progress` of work that is not told."""


@dataclass(frozen=True)
class AcceptRequest:
    """A target, its place and what may draft for it. runtime: a name, never "auto", once the runner
    has begun; told_memory: whether the runtime tells the memory of its devices."""

    model: str
    device: str
    runtime: str = "auto"
    draft: str | None = None
    draft_device: str | None = None
    draft_runtime: str = "auto"
    told_memory: bool = False
    source_language: str | None = None  # of a translator of many languages
    target_language: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AcceptRequest:
        return cls(**json.loads(text))

    @property
    def is_cpu(self) -> bool:
        return {name.strip().lower() for name in self.device.split(",")} == {"cpu"}

    def options(self, *, drafts: bool = False, **changes: Any) -> LoadOptions:
        """drafts: with the draft, where there is one."""
        asked: dict[str, Any] = {"runtime": self.runtime, "device": self.device}
        if drafts and self.draft is not None:
            asked |= {"draft": self.draft, "draft_runtime": self.draft_runtime}
            asked |= {"draft_device": self.draft_device}
        asked |= {"source_language": self.source_language, "target_language": self.target_language}
        return LoadOptions(**{**asked, **changes}, keeps_answers=False)

    @property
    def source(self) -> Source:
        return Source(self.model, silent)

    def resolved(self, options: LoadOptions) -> ResolvedModel:
        """Converts the target where that has not been done. Raises an EdgeSpecError."""
        return resolve_model(self.source, options.runtime, options, silent, options.providers)

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[Model]:
        """The target alone. Raises an EdgeSpecError, and what libraries raise."""
        options = self.options(**changes)
        model = self.resolved(options).open(options.runtime_options)
        try:
            yield model
        finally:
            model.close()

    @contextmanager
    def engine(self, *, drafts: bool = True, **changes: Any) -> Iterator[Engine]:
        """Raises as `opened` does."""
        options = self.options(drafts=drafts, **changes)
        with load_engine(self.model, options, silent) as engine:
            yield engine

    def device_memory(self) -> Mapping[str, int]:
        """Free bytes of the devices other than the processor that the target was asked to use, by
        name; those whose runtime tells nothing are left out."""
        if not self.told_memory:
            return {}
        wanted = {name.strip().lower() for name in self.device.split(",")} - {"cpu"}
        found = [Device(**each) for each in devices_of(self.runtime)]
        return {
            each.name: each.free_bytes
            for each in found
            if each.name is not None and each.name in wanted and each.free_bytes is not None
        }

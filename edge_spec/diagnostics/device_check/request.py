"""The model and the place that are checked, as they are handed to the processes that check them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_spec.core.model import Model, Progress
from edge_spec.diagnostics.doctor.chosen import Chosen
from edge_spec.engine.engine import Engine
from edge_spec.errors import EdgeSpecError
from edge_spec.fitting.devices import Device, devices_of
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel, resolve_model
from edge_spec.models.source import Source


def silent(what: str, fraction: float) -> None:
    """Ignores progress of work that nobody watches."""


@dataclass(frozen=True)
class DeviceCheckRequest:
    """A target, its place and what may draft for it. asked: arguments of LoadOptions that say where
    the target runs, with a runtime's name; drafting: those of a draft, empty where there is
    none."""

    model: str
    asked: Mapping[str, Any]
    drafting: Mapping[str, Any] = field(default_factory=dict)
    soak_s: float = 60.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceCheckRequest:
        return cls(**json.loads(text))

    @classmethod
    def of(cls, chosen: Chosen, places: LoadOptions, soak_s: float) -> DeviceCheckRequest:
        """places: as the user asked for them."""
        target, *drafts = chosen.openings
        names = ("device", "context_length", "source_language", "target_language")
        asked = {name: getattr(places, name) for name in names} | {"runtime": target.runtime}
        drafting: dict[str, Any] = {}
        if drafts:
            drafting = {"draft": drafts[0].source.model, "draft_runtime": drafts[0].runtime}
            drafting |= {"draft_device": places.draft_device}
        return cls(chosen.source.model, asked, drafting, soak_s)

    def prepare(self, progress: Progress) -> None:
        """Converts what no runtime reads as it is, while progress can be shown. The check that
        opens it finds what keeps one from it."""
        options = self.options(**self.drafting)
        with suppress(EdgeSpecError):
            source = Source(self.model, progress)
            resolve_model(source, options.runtime, options, progress, options.providers)
            for draft in options.drafts:
                source = Source(draft, progress)
                devices = options.draft_providers
                resolve_model(source, options.draft_runtime, options, progress, devices)

    @property
    def runtime(self) -> str:
        return str(self.asked["runtime"])

    @property
    def devices(self) -> set[str]:
        """The names of the target's devices; the processor where none is named."""
        return {name.strip().lower() for name in (self.asked.get("device") or "cpu").split(",")}

    @property
    def is_cpu(self) -> bool:
        return self.devices == {"cpu"}

    def options(self, **changes: Any) -> LoadOptions:
        return LoadOptions(**{**self.asked, **changes}, keeps_answers=False)

    def resolved(self, options: LoadOptions) -> ResolvedModel:
        """Converts the target where that has not been done. Raises an EdgeSpecError."""
        source = Source(self.model, silent)
        return resolve_model(source, options.runtime, options, silent, options.providers)

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[Model]:
        """Opens the target alone. Raises an EdgeSpecError, and what libraries raise."""
        options = self.options(**changes)
        model = self.resolved(options).open(options.runtime_options)
        try:
            yield model
        finally:
            model.close()

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Opens the target with its draft. Raises as `opened` does."""
        options = self.options(**self.drafting)
        with load_engine(self.model, options, silent) as engine:
            yield engine

    def free_on_devices(self) -> Mapping[str, int]:
        """Returns the free bytes of the target's devices other than the processor, by name; those
        whose runtime tells nothing are left out."""
        if self.is_cpu:
            return {}
        found = [Device(**each) for each in devices_of(self.runtime)]
        wanted = self.devices - {"cpu"}
        return {
            each.name: each.free_bytes
            for each in found
            if each.name is not None and each.name in wanted and each.free_bytes is not None
        }

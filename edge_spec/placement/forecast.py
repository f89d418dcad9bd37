"""What a target and its drafts will take together, in one line for the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel
from edge_spec.placement.memory import Memory, Sizing, format_bytes, free_bytes


@dataclass(frozen=True)
class ModelMemory:
    """One model of a forecast; role: "target" or "draft"."""

    role: str
    name: str
    runtime: str
    memory: Memory


@dataclass(frozen=True)
class Forecast:
    """Holds the memory of models that are open together; free: bytes before they are, None where
    not known."""

    models: tuple[ModelMemory, ...]
    free: int | None

    @property
    def total(self) -> int:
        """Bytes; the code of a library that runs several models is there once."""
        return sum(map(self._share, range(len(self.models))))

    @property
    def needed(self) -> int:
        """Bytes of `total` without which passes would read from the disk again."""
        return self.total - sum(model.memory.mapped_twice for model in self.models)

    @property
    def fits(self) -> bool:
        """True also where it is not known what is free."""
        return self.free is None or self.total <= self.free

    def __str__(self) -> str:
        parts = " + ".join(
            f"{model.role} {model.name} on {model.runtime} {format_bytes(self._share(i))}"
            for i, model in enumerate(self.models)
        )
        total = f" = {format_bytes(self.total)}" if len(self.models) > 1 else ""
        free = "" if self.free is None else f" of {format_bytes(self.free)} free"
        return f"{parts}{total}{free}"

    @property
    def warning(self) -> str | None:
        """What to tell the user where the models may not fit, in one line."""
        if self.fits:
            return None
        return (
            f"{self}: the system may swap or stop the program. "
            "Give a shorter --context, a smaller quantization or no --draft."
        )

    def _share(self, i: int) -> int:
        memory = self.models[i].memory
        is_loaded = self.models[i].runtime in [model.runtime for model in self.models[:i]]
        return memory.total - (memory.library if is_loaded else 0)


def forecast(
    target: ResolvedModel,
    drafts: Sequence[ResolvedModel],
    options: LoadOptions,
    num_tokens: int | None = None,
) -> Forecast | None:
    """Nothing is loaded. None where a runtime cannot tell.

    num_tokens: of text; None: as many as the target's context holds. A draft follows the text of
    the target however large its own context may be.
    """
    limit = target.config.context_length
    if num_tokens is None:
        num_tokens = min(limit, options.context_length or limit)
    models = []
    for i, prepared in enumerate((target, *drafts)):
        if not isinstance(prepared.runtime, Sizing):
            return None
        how = options.draft_runtime_options if i else options.runtime_options
        memory = prepared.runtime.memory(prepared.source, how, num_tokens)
        role = "draft" if i else "target"
        models.append(ModelMemory(role, prepared.name, prepared.runtime.name, memory))
    return Forecast(tuple(models), free_bytes())

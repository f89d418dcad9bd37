"""The options of `edge-spec distill`, and what each kind of drafter needs of its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from edge_spec.errors import MissingDependencyError, UnsupportedModelError, UsageError, install
from edge_spec.models.asked_options import option

if TYPE_CHECKING:
    from edge_spec.core.config import ModelConfig


@dataclass(frozen=True)
class DistillRequest:
    """The options of `edge-spec distill`. Raises UsageError for conflicting options and an
    unwritable `out`, MissingDependencyError without PyTorch or onnxruntime, or Ray if requested."""

    out: Path | None = option(
        None, "Directory of the drafter; without it, the cache, where the model finds it by itself."
    )
    kind: str = option("medusa", "medusa or eagle3.")
    prompts: Path | None = option(
        None,
        "What the model answers: JSON lines with id, category, and prompt or turns, or a .txt "
        "with a prompt a line; without it, what the model asks itself or, where its name has "
        "`code` in it, tasks of ours.",
    )
    num_tokens: int = option(300_000, "Of answers to learn from.", flag="--tokens", least=1)
    max_tokens: int = option(256, "Most tokens of an answer.", least=4)
    vocabulary: int | None = option(
        None,
        "Tokens that the drafter scores: those the model writes most.  [default: as many as "
        "have a fiftieth of the model's parameters]",
        least=2,
    )
    positions: int = option(3, "Draft tokens of a round that it is trained for.", least=1, most=8)
    epochs: int | None = option(
        None, "Most passes over the answers.  [default: medusa 8, eagle3 6]", least=1
    )
    ray: str | None = option(
        None, "HOST:PORT of a Ray cluster: its machines write answers.", metavar="ADDRESS"
    )
    seed: int = option(0, "Of all that is drawn.", least=0)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"there is no drafter of the kind {self.kind}", remedy=f"Use {', '.join(KINDS)}."
            )
        if self.out is not None:
            if self.out.exists() or self.out.is_symlink():
                remedy = "Remove it, or give another --out."
                raise UsageError(f"{self.out} exists already", remedy=remedy)
            _require_writable(self.out.parent)
        require_trainer()
        if self.ray is not None and find_spec("ray") is None:
            raise MissingDependencyError(
                "--ray needs Ray, which is not installed",
                remedy=f"{install('ray')}.",
            )


def _require_writable(directory: Path) -> None:
    """Raises UsageError now instead of after the training."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {directory}: {error}", remedy="Give another directory to --out."
        ) from None


def require_trainer() -> None:
    """Raises MissingDependencyError without PyTorch, or onnxruntime, which runs drafters."""
    for module, name, extra in (
        ("torch", "PyTorch", "distill"),
        ("onnxruntime", "onnxruntime", "cpu,distill"),
    ):
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"a drafter is trained with {name}, which is not installed",
                remedy=f"{install(extra)}.",
            )


@dataclass(frozen=True)
class Kind:
    """How a kind of drafter is trained.

    drafter: its name in `--drafter`. layers: features to read; the last is the state after the
    target's final norm, which the teacher needs; raises an EdgeSpecError for unsuitable targets.
    of_answers: it reads no prompt features and shares only tables; otherwise it starts as a layer
    of its target.
    """

    drafter: str
    layers: Callable[[ModelConfig], tuple[int, ...]]
    of_answers: bool
    rate: float  # maximum learning rate
    epochs: int
    rows: int  # per training step


def _eagle3_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the layer inputs that SafeAILab's code reads, and the final state."""
    count = config.num_layers
    layers = (2, count // 2, count - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 reads three layers, and {count} are too few",
            remedy="Use --kind medusa.",
        )
    is_dense = config.num_experts == 0 and config.gated_mlp and config.activation == "silu"
    if not is_dense or config.norm_places != "before" or config.qk_norm:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 begins as a layer of its target, and those of "
            f"{config.architecture} are of another form",
            remedy="Use --kind medusa.",
        )
    return (*layers, count)


KINDS = {
    "medusa": Kind(
        drafter="medusa",
        layers=lambda config: (config.num_layers,),
        of_answers=True,
        rate=2e-3,
        epochs=8,
        rows=512,
    ),
    "eagle3": Kind(
        drafter="eagle",
        layers=_eagle3_layers,
        of_answers=False,
        rate=3e-4,
        epochs=6,
        rows=1024,
    ),
}

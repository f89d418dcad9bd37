"""The kinds of drafters that are trained: what each reads, and how it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import TensorRows
from edge_spec.distill.request import DistillRequest
from edge_spec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from edge_spec.distill.trainee import Teacher, Trainee


@dataclass(frozen=True)
class Kind:
    """drafter: its name in `--drafter`. layers: the features that it reads, the last of them the
    state after the target's final norm, which its teacher is made of. of_answers: whether it reads
    those of prompts, too."""

    drafter: str
    layers: Callable[[ModelConfig], tuple[int, ...]]
    of_answers: bool
    rate: float
    epochs: int
    rows: int  # of a step
    make: Callable[[Teacher, TensorRows, DistillRequest], Trainee]


def _medusa(teacher: Teacher, source: TensorRows, request: DistillRequest) -> Trainee:
    from edge_spec.distill.medusa import MedusaTrainee

    return MedusaTrainee(teacher, request.positions)


def _eagle3(teacher: Teacher, source: TensorRows, request: DistillRequest) -> Trainee:
    from edge_spec.distill.eagle3 import Eagle3Trainee, is_like_llama

    if not is_like_llama(teacher.config):
        raise UnsupportedModelError(
            f"a head of the kind eagle3 begins as a layer of its target, and those of "
            f"{teacher.config.architecture} are of another form",
            remedy="Use --kind medusa.",
        )
    return Eagle3Trainee(teacher, source, request.positions, request.seed)


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """Inputs of the layers that SafeAILab's code reads. Raises UnsupportedModelError for a target
    of so few that they are not three."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 reads three layers, and {num_layers} are too few",
            remedy="Use --kind medusa.",
        )
    return layers


KINDS = {
    "medusa": Kind(
        drafter="medusa",
        layers=lambda config: (config.num_layers,),
        of_answers=True,
        rate=2e-3,
        epochs=8,
        rows=512,
        make=_medusa,
    ),
    "eagle3": Kind(
        drafter="eagle",
        layers=lambda config: (*eagle3_layers(config.num_layers), config.num_layers),
        of_answers=False,
        rate=5e-4,
        epochs=6,
        rows=1024,
        make=_eagle3,
    ),
}

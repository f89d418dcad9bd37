"""The kinds of drafters that are trained: what each reads, and how it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import Checkpoint, TensorRows
from edge_spec.distill.request import DistillRequest
from edge_spec.distill.small_draft_files import num_kept
from edge_spec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from edge_spec.distill.trainee import Teacher, Trainee


@dataclass(frozen=True)
class Kind:
    """drafter: its name in `--drafter`. layers: the features that it reads, the last of them the
    state after the target's final norm, which its teacher is made of. of_answers: whether it reads
    those of prompts, too. require: raises an EdgeSpecError for a target of which none can be made.
    of_layers: whether `make` is given a Checkpoint, whose layers it is made of; else TensorRows.
    scores_all: whether it drafts from the whole vocabulary."""

    drafter: str
    layers: Callable[[ModelConfig], tuple[int, ...]]
    of_answers: bool
    rate: float
    epochs: int
    rows: int  # of a step
    require: Callable[[ModelConfig, DistillRequest], object]
    make: Callable[[Teacher, Any, DistillRequest], Trainee]
    of_layers: bool = True
    scores_all: bool = False


def _medusa(teacher: Teacher, source: TensorRows, request: DistillRequest) -> Trainee:
    from edge_spec.distill.medusa import MedusaTrainee

    return MedusaTrainee(teacher, request.positions)


def _eagle3(teacher: Teacher, source: Checkpoint, request: DistillRequest) -> Trainee:
    from edge_spec.distill.eagle3 import Eagle3Trainee

    return Eagle3Trainee(teacher, source, request.positions, request.seed)


def _draft(teacher: Teacher, source: Checkpoint, request: DistillRequest) -> Trainee:
    from edge_spec.distill.small_draft import SmallDraftTrainee

    count = num_kept(teacher.config, request.layers)
    return SmallDraftTrainee(teacher, source, count, request.positions)


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


def _require_eagle3(config: ModelConfig, request: DistillRequest) -> None:
    eagle3_layers(config.num_layers)
    is_dense = config.num_experts == 0 and config.gated_mlp and config.activation == "silu"
    if not is_dense or config.norm_places != "before" or config.qk_norm:
        raise UnsupportedModelError(
            f"a head of the kind eagle3 begins as a layer of its target, and those of "
            f"{config.architecture} are of another form",
            remedy="Use --kind medusa.",
        )


KINDS = {  # by the names in request.KINDS
    "medusa": Kind(
        drafter="medusa",
        layers=lambda config: (config.num_layers,),
        of_answers=True,
        rate=2e-3,
        epochs=8,
        rows=512,
        require=lambda config, request: None,
        make=_medusa,
        of_layers=False,
    ),
    "eagle3": Kind(
        drafter="eagle",
        layers=lambda config: (*eagle3_layers(config.num_layers), config.num_layers),
        of_answers=False,
        rate=3e-4,
        epochs=6,
        rows=1024,
        require=_require_eagle3,
        make=_eagle3,
    ),
    "draft": Kind(
        drafter="draft-model",
        layers=lambda config: (config.num_layers,),
        of_answers=False,
        rate=5e-4,
        epochs=6,
        rows=1024,
        require=lambda config, request: num_kept(config, request.layers),
        make=_draft,
        scores_all=True,
    ),
}

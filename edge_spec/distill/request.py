"""Declares what is asked of a training, and checks it before anything takes long."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from edge_spec.core.config import ModelConfig
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.models.asked_options import Option

_MOST_POSITIONS = 8
_SHARE_SCORED, _LEAST_SCORED = 50, 4096


KINDS = ("medusa", "eagle3", "draft")  # of drafters; distill/kinds.py says how each is made


@dataclass(frozen=True)
class DistillRequest:
    """Declares the options of `edge-spec distill`.

    Raises UsageError for a value out of its range, MissingDependencyError without PyTorch."""

    out: Annotated[
        Path | None,
        Option(
            "Directory of the drafter; without it, the cache, where the model finds it by itself.",
            None,
        ),
    ] = None
    kind: Annotated[str, Option("medusa, eagle3 or draft.", None)] = "medusa"
    prompts: Annotated[
        Path | None,
        Option(
            "What the model answers: JSON lines with id, category, and prompt or turns, or a .txt "
            "with a prompt a line; without it, what the model asks itself or, where its name has "
            "`code` in it, tasks of ours.",
            None,
        ),
    ] = None
    num_tokens: Annotated[int, Option("Of answers to learn from.", None, flag="--tokens")] = 300_000
    max_tokens: Annotated[int, Option("Most tokens of an answer.", None)] = 256
    vocabulary: Annotated[
        int | None,
        Option(
            "Tokens that the drafter scores: those the model writes most.  [default: as many as "
            "have a fiftieth of the model's parameters]",
            None,
        ),
    ] = None
    positions: Annotated[int, Option("Draft tokens of a round that it is trained for.", None)] = 3
    epochs: Annotated[
        int | None,
        Option("Most passes over the answers.  [default: medusa 8, eagle3 and draft 6]", None),
    ] = None
    layers: Annotated[
        int | None, Option("Of an ordinary draft.  [default: one for seven of the model's]", None)
    ] = None
    ray: Annotated[
        str | None,
        Option(
            "HOST:PORT of a Ray cluster: its machines write answers and read features.",
            None,
            metavar="ADDRESS",
        ),
    ] = None
    max_cache_mb: Annotated[
        int,
        Option("MB on the disk for what the model computes of the answers.", None, "--max-cache"),
    ] = 8000
    seed: Annotated[int, Option("Of all that is drawn.", None)] = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"there is no drafter of the kind {self.kind}", remedy=f"Use {', '.join(KINDS)}."
            )
        if self.layers is not None and self.kind != "draft":
            raise UsageError("--layers is for --kind draft", remedy="Leave it out.")
        for name, value, least, most in (
            ("tokens", self.num_tokens, 1, None),
            ("max-tokens", self.max_tokens, 4, None),
            ("vocabulary", 2 if self.vocabulary is None else self.vocabulary, 2, None),
            ("positions", self.positions, 1, _MOST_POSITIONS),
            ("epochs", 1 if self.epochs is None else self.epochs, 1, None),
            ("max-cache", self.max_cache_mb, 1, None),
            ("seed", self.seed, 0, None),
        ):
            if value < least or (most is not None and value > most):
                until = "or more" if most is None else f"to {most}"
                raise UsageError(f"{name} is {value}", remedy=f"It has to be {least} {until}.")
        if self.out is not None:
            _require_free(self.out)
        require_torch()
        if self.ray is not None and find_spec("ray") is None:
            raise MissingDependencyError(
                "--ray needs Ray, which is not installed",
                remedy='Run: pip install "edge-spec[ray]".',
            )


def require_torch() -> None:
    """Raises MissingDependencyError without PyTorch."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "a drafter is trained with PyTorch, which is not installed",
            remedy='Run: pip install "edge-spec[distill]".',
        )


def default_scored(config: ModelConfig) -> int:
    """Returns how many tokens a drafter scores. Their rows are read for each draft token, so a
    small model has few of them. A multiple of 1,024, of which processors are fond."""
    rows = config.num_parameters // (_SHARE_SCORED * config.hidden_size)
    return max(_LEAST_SCORED, rows // 1024 * 1024)


def _require_free(out: Path) -> None:
    """Raises UsageError where a drafter cannot be put."""
    from tempfile import TemporaryFile

    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already", remedy="Remove it, or give another --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {out.parent}: {error}", remedy="Give another --out."
        ) from None

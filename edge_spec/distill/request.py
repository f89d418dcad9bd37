"""Declares what is asked of a training, and checks it before anything takes long."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_spec.core.config import ModelConfig
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.models.option import option

_MOST_POSITIONS = 8
_SHARE_SCORED, _LEAST_SCORED = 50, 4096


KINDS = ("medusa", "eagle3", "draft")  # of drafters; distill/kinds.py says how each is made


@dataclass(frozen=True)
class DistillRequest:
    """Declares the options of `edge-spec distill`.

    Raises UsageError for a value out of its range, MissingDependencyError without PyTorch."""

    out: Path | None = option(
        None, "Directory of the drafter; without it, the cache, where the model finds it by itself."
    )
    kind: str = option("medusa", "medusa, eagle3 or draft.")
    prompts: Path | None = option(
        None,
        "What the model answers: JSON lines with id, category, and prompt or turns, or a .txt "
        "with a prompt a line; without it, what the model asks itself or, where its name has "
        "`code` in it, tasks of ours.",
    )
    num_tokens: int = option(300_000, "Of answers to learn from.", flag="--tokens")
    max_tokens: int = option(256, "Most tokens of an answer.")
    vocabulary: int | None = option(
        None,
        "Tokens that the drafter scores: those the model writes most.  [default: as many as "
        "have a fiftieth of the model's parameters]",
    )
    positions: int = option(3, "Draft tokens of a round that it is trained for.")
    epochs: int | None = option(
        None, "Most passes over the answers.  [default: medusa 8, eagle3 and draft 6]"
    )
    layers: int | None = option(
        None, "Of an ordinary draft.  [default: one for seven of the model's]"
    )
    ray: str | None = option(
        None,
        "HOST:PORT of a Ray cluster: its machines write answers and read features.",
        metavar="ADDRESS",
    )
    max_cache_mb: int = option(
        8000, "MB on the disk for what the model computes of the answers.", flag="--max-cache"
    )
    seed: int = option(0, "Of all that is drawn.")

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

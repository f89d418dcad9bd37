"""What is asked of a training, checked before anything takes long."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_spec.errors import MissingDependencyError, UsageError

KINDS = ("medusa", "eagle3", "draft")
_MOST_POSITIONS = 8


@dataclass(frozen=True)
class DistillRequest:
    """Raises UsageError for a value out of its range, MissingDependencyError without PyTorch.

    num_tokens: of answers. max_tokens: of one. vocabulary: tokens that the drafter scores.
    positions: draft tokens that it is trained for. epochs: None: what is usual for the kind.
    layers: of an ordinary draft; None: one for seven of the target's. ray: the address of a
    cluster.
    """

    out: Path
    kind: str = "medusa"
    prompts: Path | None = None
    domain: Path | None = None
    num_tokens: int = 300_000
    max_tokens: int = 256
    vocabulary: int = 4096
    positions: int = 3
    epochs: int | None = None
    layers: int | None = None
    ray: str | None = None
    max_cache_bytes: int = 4_000_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"there is no drafter of the kind {self.kind}", remedy=f"Use {', '.join(KINDS)}."
            )
        if self.prompts is not None and self.domain is not None:
            raise UsageError(
                "--prompts and --domain both say what is asked", remedy="Leave one out."
            )
        if self.layers is not None and self.kind != "draft":
            raise UsageError("--layers is for --kind draft", remedy="Leave it out.")
        for name, value, least, most in (
            ("tokens", self.num_tokens, 1, None),
            ("max-tokens", self.max_tokens, 4, None),
            ("vocabulary", self.vocabulary, 2, None),
            ("positions", self.positions, 1, _MOST_POSITIONS),
            ("epochs", 1 if self.epochs is None else self.epochs, 1, None),
            ("max-cache", self.max_cache_bytes, 1, None),
            ("seed", self.seed, 0, None),
        ):
            if value < least or (most is not None and value > most):
                until = "or more" if most is None else f"to {most}"
                raise UsageError(f"{name} is {value}", remedy=f"It has to be {least} {until}.")
        _require_free(self.out)
        if find_spec("torch") is None:
            raise MissingDependencyError(
                "a drafter is trained with PyTorch, which is not installed",
                remedy='Run: pip install "edge-spec[distill]".',
            )
        if self.ray is not None and find_spec("ray") is None:
            raise MissingDependencyError(
                "--ray needs Ray, which is not installed",
                remedy='Run: pip install "edge-spec[ray]".',
            )


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

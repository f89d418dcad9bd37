"""Describes the hardware that a bundle was compiled for."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field


class CompiledFor(BaseModel):
    """The part of a manifest that binds a bundle to one NPU.

    versions: of the compiler's parts, by their names. outside: operators that the compiler left to
    the CPU, counted by name, of each function.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    soc: str = Field(pattern=r"^[A-Z0-9]{1,20}$")
    htp_arch: int = Field(ge=1, le=999)
    versions: Mapping[str, str]
    shares_weights: bool  # whether one binary holds the weights of all functions
    outside: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        return f"{self.soc} (HTP v{self.htp_arch})"

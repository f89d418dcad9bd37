"""Multiplies by the matrices of a training, in the numbers that the processor is fastest with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = Any  # torch.Tensor: the library's types are not there where it is not installed
# What `torch.cpu` calls instructions that multiply bfloat16, of x86 and of ARM.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Products:
    """Rounds what is multiplied to `kind`, float32 or bfloat16. Sums of rows, losses and parameters
    stay float32 (Micikevicius et al. 2018, mixed precision)."""

    kind: str = "float32"

    def rounded(self, values: Tensor) -> Tensor:
        """Returns them as they are multiplied. A matrix is made once for all products of a step."""
        return values.to(self._type)

    def of(self, x: Tensor, matrix: Tensor) -> Tensor:
        """[..., outputs]. x: [..., inputs]; matrix: [outputs, inputs], rounded."""
        return torch.nn.functional.linear(self.rounded(x), matrix)

    @property
    def _type(self) -> Any:
        return getattr(torch, self.kind)


FLOAT32 = Products()


def fastest_products() -> Products:
    """bfloat16 where the processor, or the GPU that is trained on, multiplies it by itself: two to
    four times as fast. Elsewhere it would be slower than float32."""
    if torch.get_default_device().type == "cuda":
        return Products("bfloat16" if torch.cuda.is_bf16_supported(False) else "float32")
    told: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_it = any(told.get(name) for name in _BFLOAT16_INSTRUCTIONS)
    return Products("bfloat16" if has_it else "float32")

"""What P-EAGLE heads have beside EAGLE-3 heads, as speculators, NeMo and Amazon publish them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edge_spec.core.heads import EagleHead, MaskedRows
from edge_spec.errors import ModelFileError, UsageError
from edge_spec.exporters.heads.head_files import count, mapping, unusable
from edge_spec.exporters.stored_tensor import StoredTensor

MASKED = "mask_hidden"  # [..., features] of a token of which nothing is known
_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # how config.json calls that token
_PARALLEL = "parallel_drafting"
_KIND = "peagle"
_COUNT, _MAX_COUNT = 8, 64  # tokens: as heads are trained where config.json does not tell


def masked_rows(
    head: EagleHead, values: Mapping[str, Any], stored: StoredTensor | None
) -> MaskedRows | None:
    """Returns None for a head that drafts one token after the other. Raises ModelFileError for one
    that lacks what it needs for several, UsageError for a token that the target has not."""
    stated = mapping(values, "speculators_config")
    if stored is None:
        kinds = (values.get("speculators_model_type"), stated.get("algorithm"))
        if values.get(_PARALLEL) or _KIND in kinds:
            raise ModelFileError(
                f"{head.path} drafts several tokens in one pass, but tensor {MASKED} is missing",
                remedy="Download the head again.",
            )
        return None
    size = len(head.feature_layers) * head.feature_size
    if math.prod(stored.shape) != size or stored.shape[-1] != size:
        raise ModelFileError(
            f"{head.path}: tensor {MASKED} has the shape {list(stored.shape)}, expected [{size}]",
            remedy="Download the head again, or use it with its own target.",
        )
    return MaskedRows(
        _token(head, values), stored.float32().reshape(-1), _count(head, values, stated)
    )


def _token(head: EagleHead, values: Mapping[str, Any]) -> int:
    told = next((values[name] for name in _TOKENS if values.get(name) is not None), None)
    if isinstance(told, bool) or not str(told).isdecimal() or len(str(told)) > 9:
        raise unusable(head.path, f"usable {_TOKENS[0]}")
    token = int(str(told))
    if token >= head.config.vocab_size:
        raise UsageError(
            f"{head.path}: its mask token {token} is beyond the target's vocabulary of "
            f"{head.config.vocab_size}",
            remedy="Use the head with the model that it was trained for.",
        )
    return token


def _count(head: EagleHead, values: Mapping[str, Any], stated: Mapping[str, Any]) -> int:
    methods = stated.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    told = first if isinstance(first, dict) else values
    return min(count(head.path, told, "speculative_tokens", _COUNT), _MAX_COUNT)

"""Typical costs of passes and acceptance of drafters, used before anything is measured here.

A prior only decides what is tried first and how much that may lose. The acceptance that a head's
training reported weighs no more, so it cannot rule out the head here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_spec.drafters.protocol import DrafterTraits

# Time of a pass over that of one row. Measured for 2, 4 and 8 rows: int4 on onnxruntime and
# llama.cpp 1.1 to 1.8, 1.5 to 3.3 and 2.5 to 7.5; our few-row kernels 1.0 to 1.1, 1.1 to 1.3 and
# 1.2 to 2.2; a GPU 1.01 to 1.05. With higher priors drafting would never be tried.
LIBRARY_KERNELS: Mapping[int, float] = {1: 1.0, 2: 1.2, 4: 1.7, 8: 2.8, 16: 5.0}
OWN_KERNELS: Mapping[int, float] = {1: 1.0, 2: 1.08, 4: 1.22, 8: 1.7, 16: 3.2}
ACCELERATOR: Mapping[int, float] = {1: 1.0, 2: 1.03, 4: 1.1, 8: 1.25, 16: 1.6}

# Acceptance by position, given that all before it were accepted; the last figure repeats.
# Qwen2.5-Coder 0.5B for 1.5B: 0.87 (benchmarks/results/sibling.json); EAGLE-3 for Llama-3.1-8B
# 0.73, 0.71, 0.68, for Qwen3-8B 0.65, 0.61, 0.51 (vLLM's tests).
_LOOKUP = (0.5, 0.6)
_HEADS: Mapping[str, Sequence[float]] = {
    "eagle": (0.7, 0.65, 0.6),
    "medusa": (0.6, 0.45, 0.4),
    "dflash": (0.7, 0.65, 0.6),
}
_ANY_HEAD = (0.6, 0.5)
# Draft models of the target's family, by the highest cost of a draft token, in target steps.
_SIBLINGS: Mapping[float, Sequence[float]] = {
    0.05: (0.6,),
    0.15: (0.7,),
    0.3: (0.78,),
    float("inf"): (0.85,),
}
_POSITIONS = 8
# Weights of the prior and of a training report, in draft tokens.
_PRIOR_TOKENS, _REPORTED_TOKENS = 24.0, 24.0


def row_shares(kernels: str, device: str) -> Mapping[int, float]:
    """Return the usual time of a pass by rows, over that of one row. kernels: our own kernels' name
    (`runtimes.own_kernels`); "" for the library's. device: "" for the processor."""
    if device and "CPU" not in device.upper():
        return ACCELERATOR
    return OWN_KERNELS if kernels else LIBRARY_KERNELS


def expect_acceptance(
    traits: DrafterTraits, draft_token: float, reported: Sequence[float]
) -> list[float]:
    """Return the expected acceptance by position, given that all before it were accepted.

    draft_token: cost of a draft token in plain steps. reported: acceptance that training reported;
    may be empty.
    """
    usual: Sequence[float] = _LOOKUP
    if traits.head:
        usual = _HEADS.get(traits.head, _ANY_HEAD)
    elif traits.draft_model:
        usual = next(each for ratio, each in _SIBLINGS.items() if draft_token <= ratio)
    found = [usual[min(place, len(usual) - 1)] for place in range(_POSITIONS)]
    if not reported:
        return found
    share = _REPORTED_TOKENS / (_PRIOR_TOKENS + _REPORTED_TOKENS)
    known = [reported[min(place, len(reported) - 1)] for place in range(_POSITIONS)]
    return [prior + share * (seen - prior) for prior, seen in zip(found, known, strict=True)]

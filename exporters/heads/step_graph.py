"""A head's step as one graph, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

from edge_spec.core.heads import DFlashHead, EagleHead, HeadMatrix, MedusaHead, TrainedHead
from edge_spec.exporters.heads.dflash_graph import DFlashGraph
from edge_spec.exporters.heads.eagle_graph import EagleGraph
from edge_spec.exporters.heads.medusa_graph import MedusaGraph


def step_graph(
    head: TrainedHead, matrices: Mapping[str, HeadMatrix], bits: int, weights: BinaryIO
) -> bytes:
    """Returns a serialized ModelProto, whose weights are written. matrices: all of the head's, as
    `core.heads.HeadBackend` names them; bits: 4 or 8, or FLOAT_BITS; output matrices score the
    likeliest tokens by 8 at least."""
    if isinstance(head, MedusaHead):
        return MedusaGraph(head, matrices, bits, weights).built()
    if isinstance(head, EagleHead):
        return EagleGraph(head, matrices, bits, weights).built()
    assert isinstance(head, DFlashHead)  # assistants are computed by numpy alone
    return DFlashGraph(head, matrices, bits, weights).built()

"""What a session on a GPU allocates, binds and copies for each act, in bytes.

    python benchmarks/device_traffic.py BUNDLE

The sessions and their graphs are those of CUDA, run on the CPU's provider: bytes are counted, and
nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.models.bundle import open_bundle
from edge_spec.runtimes.ort import OrtModel
from edge_spec.runtimes.ort.device_place import Place
from edge_spec.runtimes.ort.device_session import DeviceSession
from edge_spec.runtimes.ort.graph_forms import GraphForm

LENGTHS = (200, 1800)
PARENTS = (-1, 0, 0, 2, 3, 3, 5, 6)
KEPT = (0, 2, 3, 5)
FORM = GraphForm(is_half=True, is_attended_once=True)


def main(path: str) -> None:
    model = OrtModel(open_bundle(Path(path)), RuntimeOptions(), FORM, Place("cpu", 0))
    tokens = np.random.RandomState(0).randint(0, model.config.vocab_size, max(LENGTHS)).tolist()
    for length in LENGTHS:
        with closing(model.open_session()) as session:
            assert isinstance(session, DeviceSession)
            _count(session, length, tokens)


def _count(session: DeviceSession, length: int, tokens: list[int]) -> None:
    single, chain = TokenTree.chain(1), TokenTree.chain(1, tokens[:7])
    rows = len(PARENTS)
    tree = TokenTree(
        np.array(tokens[:rows], np.int32), np.array(PARENTS, np.int32), np.ones(rows, np.float32)
    )
    acts: list[tuple[str, Callable[[], object]]] = [
        ("prompt", lambda: session.prefill(tokens[:length])),
        ("1 row, the first of its width", lambda: session.forward(single)),
        ("1 row", lambda: session.forward(single)),
        ("chain of 8, the first of its width", lambda: session.forward(chain)),
        ("chain of 8", lambda: session.forward(chain)),
        ("commit of 5 rows", lambda: session.commit(range(5))),
        ("tree of 8, the first of its width", lambda: session.forward(tree)),
        ("tree of 8", lambda: session.forward(tree)),
        ("commit of its path", lambda: session.commit(KEPT)),
        ("state", lambda: session.state()),
    ]
    for name, act in acts:
        before = asdict(session.traffic)
        act()
        moved = {key: value - before[key] for key, value in asdict(session.traffic).items()}
        told = ", ".join(f"{key} {value:,}" for key, value in moved.items())
        print(f"{length} tokens, {name}: {told}")


if __name__ == "__main__":
    main(sys.argv[1])

"""`edge_spec.load_async`, apart from `load`, since importing asyncio takes time."""

from __future__ import annotations

from edge_spec.engine.async_engine import awaited
from edge_spec.loader import load

load_async = awaited(load)
load_async.__name__ = load_async.__qualname__ = "load_async"

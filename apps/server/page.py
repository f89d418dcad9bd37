"""The files of the web page, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec


def load_page() -> Mapping[str, tuple[bytes, str]]:
    """Content and media type; empty where the page is not installed."""
    if find_spec("edge_spec.apps.web") is None:
        return {}
    assets = import_module("edge_spec.apps.web").load_assets()
    return {name: (asset.content, asset.media_type) for name, asset in assets.items()}

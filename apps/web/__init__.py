"""The web page that `edge-spec serve` shows: plain HTML, CSS and JavaScript modules.

Nothing is built and nothing comes from another address: what is in `static` is what the browser
gets. The page asks for `static/NAME` and for the server's endpoints relative to its own address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

INDEX = "index.html"  # what `/` answers; all others are `/static/NAME`
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str  # as a Content-Type header


def load_assets() -> Mapping[str, Asset]:
    """All files by name, about 100 kB, without directories: a name that is not a key does not
    exist, so no request can reach another file.

    Raises KeyError for a file of a kind that is not served.
    """
    found = {}
    for file in files("edge_spec.apps.web").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        found[file.name] = Asset(file.read_bytes(), _MEDIA_TYPES[suffix])
    return MappingProxyType(found)


__all__ = ["INDEX", "Asset", "load_assets"]

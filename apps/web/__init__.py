"""The web page that `edge-spec serve` shows: plain HTML, CSS and JavaScript modules.

Nothing is built and nothing comes from another address: what is in `static` is what the browser
gets. The page asks for `static/NAME` and for the server's endpoints relative to its own address.
"""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
INDEX = STATIC / "index.html"  # what `/` answers; all others are `/static/NAME`

__all__ = ["INDEX", "STATIC"]

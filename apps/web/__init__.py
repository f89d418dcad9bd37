"""The web page that `edge-spec serve` shows: plain HTML, CSS and JavaScript modules.

Nothing is built and nothing comes from another address: what is in `static` is what the browser
gets. The page asks for `static/NAME` and for the server's endpoints relative to its own address.
"""

from edge_spec.apps.web.assets import INDEX, Asset, load_assets

__all__ = ["INDEX", "Asset", "load_assets"]

"""What a device's compiler makes of a bundle, kept in the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from edge_spec.models.bundle import MANIFEST, Bundle
from edge_spec.models.kept import KeptDirectory
from edge_spec.storage.atomic import cache_directory, sha256_file

_log = logging.getLogger(__name__)


def compiled_bundle(bundle: Bundle, device: str, key: Mapping[str, Any]) -> KeptDirectory:
    """Return where the compiled form of a bundle is kept for one kind of device, such as "coreml".

    key: all that it depends on beside the bundle, as JSON has it. Its files are checked: OpenVINO
    takes a graph of which a byte was flipped.
    """
    digest = sha256_file(bundle.path / MANIFEST)
    return KeptDirectory(
        cache_directory() / "compiled" / f"{digest[:16]}-{device}",
        {**key, "bundle": digest},
        partial(_log.warning, "compiling %s for %s (once)", bundle.path, device),
        partial(_log.warning, "waiting for another process that compiles %s", bundle.path),
    )

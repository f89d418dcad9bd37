"""A model of the hub, fetched or found in the cache."""

from __future__ import annotations

import logging

from edge_spec.core.model import Progress
from edge_spec.models import runtimes
from edge_spec.models.hub.cache import HubModel, find_cached, folder, link, remember
from edge_spec.models.hub.choosing import CONFIG, choose, missing_tokenizer
from edge_spec.models.hub.client import UnreachableError, list_files
from edge_spec.models.hub.download import fetch_blobs, require_sane
from edge_spec.models.hub.reference import HubReference

_log = logging.getLogger(__name__)


def open_model(reference: HubReference, progress: Progress) -> HubModel:
    """Opens it from the cache, without asking the hub, where all of it is there; else pulled.

    Raises as `pull` does.
    """
    return find_cached(reference) or pull(reference, progress)


def pull(reference: HubReference, progress: Progress) -> HubModel:
    """The model as the hub has it now; where the hub cannot be reached, as the cache has it, which
    one line says.

    Raises DownloadError, UsageError where it is not clear which file is meant, and
    UnsupportedModelError for a repository without one that can be read.
    """
    try:
        listing = list_files(reference)
    except UnreachableError as error:
        cached = find_cached(reference)
        if cached is None:
            raise
        _log.warning("%s is opened as the cache has it: the hub was not asked", reference)
        _log.debug("%s", error)
        return cached
    choice = choose(reference, listing.files)
    require_sane(reference, {name: listing.files[name] for name in choice.names})
    if choice.has_to_be_head:
        fetch_blobs(reference, listing, [CONFIG], progress)
        if not runtimes.says_head(folder(reference) / "blobs" / listing.files[CONFIG].digest):
            raise missing_tokenizer(reference)
    # Descriptions first: small, and without permission they fail before the weights.
    fetch_blobs(reference, listing, list(choice.names), progress)
    snapshot = folder(reference) / "snapshots" / listing.commit
    # A directory without its config.json is no model: it comes last.
    for name in sorted(choice.names, key=lambda name: name == CONFIG):
        link(folder(reference) / "blobs" / listing.files[name].digest, snapshot / name)
    remember(reference, listing.commit)
    return HubModel(reference, listing.commit, snapshot, choice)

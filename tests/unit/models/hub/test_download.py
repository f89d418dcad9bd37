"""What a server may send in the place of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from edge_spec.errors import DownloadError, UsageError
from edge_spec.models.hub.client import HubReference, RemoteFile, RepositoryListing
from edge_spec.models.hub.download import (
    MAX_FILE_BYTES,
    MAX_SMALL_BYTES,
    fetch_blobs,
    require_sane,
)

CHUNK = b"x" * 40
STATED_BYTES = 100


@pytest.mark.parametrize("digits", [64, 40], ids=["large", "small"])
def test_a_file_without_end_is_cut_at_the_size_that_the_hub_states(
    digits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    def send(url: str, out: Any, **options: Any) -> None:
        nonlocal sent
        for _ in range(9):
            out.write(CHUNK)
            sent += len(CHUNK)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download, "http_get", send)
    listing = RepositoryListing("0" * 40, {"weights": RemoteFile(STATED_BYTES, "0" * digits)})
    with pytest.raises(DownloadError, match="another size than the hub states"):
        fetch_blobs(HubReference("org/model"), listing, ["weights"], lambda what, fraction: None)
    assert sent == 80  # the third chunk would have gone beyond it
    [partial] = tmp_path.rglob("*.incomplete")
    assert partial.stat().st_size == sent


@pytest.mark.parametrize(
    ("name", "most"), [("config.json", MAX_SMALL_BYTES), ("m.GGUF", MAX_FILE_BYTES)]
)
def test_a_file_of_absurd_size_is_refused(name: str, most: int) -> None:
    reference = HubReference("org/small")
    require_sane(reference, {name: RemoteFile(most, "0" * 64)})
    with pytest.raises(UsageError, match=rf"{name} of hf:org/small has .* at most"):
        require_sane(reference, {name: RemoteFile(most + 1, "0" * 64)})

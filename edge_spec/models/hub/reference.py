"""`hf:org/name[@revision][:file]`, a model on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_spec.errors import UsageError
from edge_spec.models.bundle_files import is_below

PREFIX = "hf:"
DEFAULT_REVISION = "main"
_SHOWN = 200  # characters of what is no reference

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # of a repository's name; becomes a folder's name
_REFERENCE = re.compile(rf"hf:({_PART}/{_PART})(?:@([^:@]{{1,200}}))?(?::(.+))?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubReference:
    repository: str  # org/name
    revision: str = DEFAULT_REVISION  # a branch, tag or commit
    file: str | None = None  # one GGUF file of the repository; None: chosen

    @classmethod
    def parse(cls, model: str) -> HubReference:
        """Raises UsageError; so no part of a reference leads out of the folder it names."""
        match = _REFERENCE.fullmatch(model)
        if match is None or "--" in match[1] or ".." in match[1]:
            raise UsageError(
                f"{model[:_SHOWN]!r} names no model of the hub",
                remedy="Write hf:org/name, hf:org/name:file.gguf or hf:org/name@revision.",
            )
        repository, revision, file = match[1], match[2] or DEFAULT_REVISION, match[3]
        if not _REVISION.fullmatch(revision) or not is_below(revision):
            raise UsageError(
                f"{revision!r} is no revision", remedy="Give a branch, a tag or a commit after @."
            )
        if file is not None and not (is_below(file) and file.lower().endswith(".gguf")):
            raise UsageError(
                f"{file[:_SHOWN]!r} is not the name of a GGUF file",
                remedy=f"Name one, or write hf:{repository} for a model of safetensors.",
            )
        return cls(repository, revision, file)

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        file = "" if self.file is None else f":{self.file}"
        return f"{PREFIX}{self.repository}{revision}{file}"


def is_on_hub(model: str) -> bool:
    return model.startswith(PREFIX)

"""Takes out of a report what is the user's own: it is attached to an issue for all to see."""

from __future__ import annotations

import getpass
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_spec.storage.atomic import cache_directory

_SHORTEST_NAME = 3  # letters of a user's or a host's name: shorter ones are parts of words
# A path of a system: all but its last part goes. A quote or a space ends it, a colon begins it
# where a drive is named.
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\\/\s'\"`:;,()<>|]+){2,}[\\/]?")


class Privacy:
    """Keeps the last part of each path, and nothing of the names of user and machine."""

    def __init__(self, models: Iterable[str]) -> None:
        """models: as the user named them; of a path to one, its name stays."""
        places = [Path.home(), Path.cwd(), cache_directory(), Path(sys.prefix)]
        places.append(Path(tempfile.gettempdir()))
        for model in models:
            with suppress(OSError):
                places += [Path(model).parent.absolute(), Path(model).parent.resolve()]
        found = {str(place) for place in places if len(place.parts) > 1}
        self._places = sorted(found, key=len, reverse=True)  # the longest first
        self._names = sorted(_own_names(), key=len, reverse=True)

    def cleaned(self, value: Any) -> Any:
        """A document as JSON has it, cleaned throughout, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.cleaned(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.cleaned(each) for each in value]
        return value

    def text(self, text: str) -> str:
        for place in self._places:
            text = text.replace(place, "\u2026")
        text = _PATH.sub(_last_part, text)
        for name in self._names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "\u2026", text)
        return text


def _last_part(match: re.Match[str]) -> str:
    return "\u2026/" + re.split(r"[\\/]", match[0].rstrip("\\/"))[-1]


def _own_names() -> set[str]:
    names = {Path.home().name, socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(Exception):  # no such user: what is raised depends on the system
        names.add(getpass.getuser())
    # The name of root is everywhere, and nobody's.
    return {name for name in names if len(name) >= _SHORTEST_NAME} - {"root", "localhost"}

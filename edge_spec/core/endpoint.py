"""The address of a server, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_spec.errors import UsageError

_FORM = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_LARGEST_PORT = 65_535


@dataclass(frozen=True)
class Endpoint:
    host: str  # a name or an IPv4 address
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse "host:port". Raises UsageError for anything else."""
        found = _FORM.fullmatch(text)
        if found is None or not 1 <= int(found["port"]) <= _LARGEST_PORT:
            raise UsageError(
                f"{text!r} is no address of a server",
                remedy="Give host:port, such as 192.168.0.2:50052; IPv6 is not supported.",
            )
        return cls(found["host"], int(found["port"]))

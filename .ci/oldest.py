"""Prints pip's constraints for the oldest version that pyproject.toml allows of every dependency.

python .ci/oldest.py cpu llamacpp serve      # of edge-spec itself and of these extras
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_BOUND = re.compile(r"([A-Za-z0-9_-]+)(?:\[[^]]*\])?\s*(?:>=|==)\s*([0-9.]+)")


def oldest(extras: list[str]) -> list[str]:
    """Return one `name==version` a dependency. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        for dependency in project["optional-dependencies"][extra]:
            own = re.match(r"edge-spec\[(.*)\]", dependency)
            wanted += oldest(own[1].split(",")) if own else [dependency]
    found = (_BOUND.match(each.replace(".*", "")) for each in wanted)
    return sorted({f"{each[1]}=={each[2]}" for each in found if each})


if __name__ == "__main__":
    print("\n".join(oldest(sys.argv[1:])))

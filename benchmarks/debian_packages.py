"""apt-get with lists and a cache of its own: nothing is installed, and nobody has to be root."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Apt:
    """Packages of one source, fetched into a directory that may be deleted afterwards.

    source: a line of sources.list. Raises CalledProcessError where a download fails.
    """

    def __init__(self, work: Path, source: str, architecture: str | None = None) -> None:
        self._work = work
        for name in ("lists/partial", "archives/partial"):
            (work / name).mkdir(parents=True)
        (work / "sources.list").write_text(source, encoding="ascii")
        settings = {
            "Dir::State": work,
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": work,
            "Dir::Etc::sourcelist": work / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",  # the usual one may not read the directory
            "Debug::NoLocking": "true",
        }
        if architecture is not None:
            settings |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
        self._command = ["apt-get", "-qq"]
        for name, value in settings.items():
            self._command += ["-o", f"{name}={value}"]
        self.run("update")

    def run(self, *arguments: str) -> None:
        """apt-get with these arguments, in the directory."""
        command = [*self._command, *arguments]
        subprocess.run(command, check=True, cwd=self._work, stdout=subprocess.DEVNULL)

"""Commands and options that are gone, and what to use instead. A line stays for one version."""

from __future__ import annotations

_ENERGY = "what the machine draws is not measured any more"
_INSTEAD = {
    "accept": "accept is gone: edge-spec doctor MODEL --run tries a device",
    "--power-log": f"--power-log is gone: {_ENERGY}. Leave it out",
    "--prefer": f"--prefer is gone: {_ENERGY}, and a plan is the fastest. Leave it out",
}


def or_instead(complaint: str) -> str:
    """Returns the parser's complaint, or what to use instead where it is about what is gone."""
    for name, instead in _INSTEAD.items():
        if complaint.startswith((f"No such option: {name}", f"No such command '{name}'")):
            return instead
    return complaint

"""The formats that strings and numbers are held to, as regular expressions and bounds.

Where what writes a schema takes less than the format's standard does, the narrower form is here:
dates that exist, no leap seconds, lengths of time that are counted, addresses with a domain.
"""

from __future__ import annotations

from collections.abc import Mapping

# Formats that llguidance holds itself.
NATIVE = frozenset({"ipv4", "ipv6", "uri", "uuid"})

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = rf"(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,6}}:|::(?:{_GROUP}:){{0,5}}{_GROUP}|::)"
_HEX = "[0-9a-fA-F]"
# Years of four digits: earlier ones are not what a schema means, and year 0 does not exist.
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_TIME = f"{_CLOCK}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_SPAN = "(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
_DAYS = "(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,6}D)"
# Two hyphens in a row begin names of other alphabets, not all of which there may be.
_LABEL = "[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,20})?"
_WORD = "[a-zA-Z0-9_+-]{1,31}"
_BASE64 = "(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?"


def _uuid(version: int) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


# A string of the format matches the whole of it.
PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]{{1,5}}W|T{_SPAN}|{_DAYS}(?:T{_SPAN})?)",
    "email": rf"{_WORD}(?:\.{_WORD})?@(?:{_LABEL}\.){{1,3}}[a-zA-Z]{{2,24}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,4}}",
    "ipvanyaddress": _IPV4,
    "ipvanyinterface": rf"{_IPV4}/(?:[12]?[0-9]|3[0-2])",
    "ipv4interface": rf"{_IPV4}/(?:[12]?[0-9]|3[0-2])",
    "ipv6interface": rf"{_IPV6}/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])",
    # Bits beyond the length of a network's prefix are zero.
    "ipv4network": rf"(?:{_IPV4}/32|(?:{_BYTE}\.){{3}}0/24|(?:{_BYTE}\.){{2}}0\.0/16)",
    "ipv6network": rf"{_IPV6}/128",
    "base64": _BASE64.format("a-zA-Z0-9+/"),
    "byte": _BASE64.format("a-zA-Z0-9+/"),
    "base64url": _BASE64.format("a-zA-Z0-9_-"),
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
}
PATTERNS = {**PATTERNS, "ipvanynetwork": PATTERNS["ipv4network"]}

# Any string is one of these, so that nothing is passed over.
FREE = frozenset({"path", "binary", "password", "textarea", "text"})

# Of whole numbers: the least and the greatest.
BOUNDS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
# What numbers have, beside float, double and others that any number is one of.
NUMBERS = frozenset({*BOUNDS, "float", "double", "number", "decimal"})

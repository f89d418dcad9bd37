"""Schemas as pydantic writes them, topic by topic of its documentation: answers are what the class
itself takes."""

from __future__ import annotations

import enum
import ipaddress
import json
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import pydantic
import pytest
from pydantic import (
    AnyUrl,
    Base64Bytes,
    Base64UrlBytes,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    conint,
    conlist,
    constr,
)

from edge_spec.text.grammar import Grammar
from fixtures.form_walks import walked


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    meows: int


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: float


class Lizard(BaseModel):
    kind: Literal["reptile", "lizard"]
    scales: bool


class BlackCat(BaseModel):
    pet_type: Literal["cat"]
    color: Literal["black"]
    black_name: str


class WhiteCat(BaseModel):
    pet_type: Literal["cat"]
    color: Literal["white"]
    white_name: str


class Parrot(BaseModel):
    pet_type: Literal["parrot"]
    name: str


NestedCat = Annotated[BlackCat | WhiteCat, Field(discriminator="color")]


class Owner(BaseModel):
    pet: Annotated[NestedCat | Parrot, Field(discriminator="pet_type")]
    n: int


class Pets(BaseModel):
    pets: list[Annotated[Cat | Dog | Lizard, Field(discriminator="kind")]] = Field(max_length=3)


class Node(BaseModel):
    value: int
    following: Node | None = None


class Tree(BaseModel):
    name: str
    children: list[Tree] = Field(default_factory=list, max_length=2)


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    NONE = None
    ONE = 1
    TEXT = "x"


class Numbers(BaseModel):
    positive: int = Field(gt=0)
    percent: float = Field(ge=0, le=100)
    fraction: float = Field(gt=0, lt=1)
    even: int = Field(multiple_of=2)
    small: conint(ge=-3, lt=3)  # type: ignore[valid-type]
    below: float = Field(lt=0, ge=-0.5)


class Texts(BaseModel):
    short: str = Field(min_length=1, max_length=4)
    code: str = Field(pattern=r"^[A-Z]{2}-\d{3}$")
    loud: Annotated[str, StringConstraints(pattern=r"^\w+$", max_length=8)]
    old: constr(min_length=2)  # type: ignore[valid-type]


class Containers(BaseModel):
    pair: tuple[int, str]
    many: tuple[bool, ...]
    tags: set[str]
    colors: frozenset[Color]
    two: conlist(int, min_length=2, max_length=3)  # type: ignore[valid-type]
    queue: deque[int]
    counts: dict[str, int]
    by_color: dict[Literal["a", "b"], float]
    by_number: dict[Annotated[str, Field(pattern="^[a-z]{1,3}$")], bool]
    grouped: defaultdict[str, list[int]]
    ordered: OrderedDict[str, None]
    anything: list[Any]
    sequence: Sequence[int]
    mapping: Mapping[str, int]


class Times(BaseModel):
    day: date
    at: datetime
    clock: time
    length: timedelta


class Kinds(BaseModel):
    id4: uuid.UUID
    id5: pydantic.UUID5
    price: Decimal
    cents: Decimal = Field(max_digits=5, decimal_places=2, ge=0)
    raw: bytes
    text64: Base64Bytes
    url64: Base64UrlBytes
    path: Path
    secret: SecretStr


class Addresses(BaseModel):
    four: ipaddress.IPv4Address
    six: ipaddress.IPv6Address
    url: AnyUrl


@dataclass
class Point:
    x: int
    y: int = 0
    label: str | None = None


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid")
    full_name: str = Field(alias="fullName", title="Name", examples=["Ann"])
    from_: int = Field(validation_alias="from", serialization_alias="from")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    a: int


class Described(BaseModel):
    """A docstring becomes a description, beside a reference."""

    cat: Cat = Field(description="Beside a reference.", deprecated=True)
    color: Color = Color.RED
    maybe: Cat | None = Field(None, title="Maybe")


class Optionals(BaseModel):
    a: int | None = None
    b: str | int | None
    c: Literal["x", 1, True, None] = None
    d: Mixed = Mixed.ONE
    e: Level
    f: bool = False


# Whose checks are not all in the schema: only the schema is asked.
BEYOND = {"base64"}
CASES: dict[str, Any] = {
    "union": TypeAdapter(int | str | list[bool] | None),
    "discriminated": Pets,
    "nested-discriminated": Owner,
    "recursive": Node,
    "tree": Tree,
    "enum": TypeAdapter(list[Color | Level | Mixed]),
    "numbers": Numbers,
    "texts": Texts,
    "containers": Containers,
    "times": Times,
    "base64": Kinds,
    "addresses": Addresses,
    "dataclass": TypeAdapter(Point),
    "aliases": Aliased,
    "extra": Open,
    "described": Described,
    "optionals": Optionals,
    "root": RootModel[dict[str, list[int]]],
    "any": TypeAdapter(Any),
}


def _number(text: str) -> float:
    """JSON has numbers that Python's floats do not reach."""
    return min(max(float(text), -1e300), 1e300)


def _adapter(given: Any) -> TypeAdapter[Any]:
    return given if isinstance(given, TypeAdapter) else TypeAdapter(given)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_what_the_class_takes(name: str) -> None:
    adapter = _adapter(CASES[name])
    schema = adapter.json_schema()
    judge = jsonschema_rs.validator_for(schema)
    grammar, num_ended = Grammar.json_schema(schema), 0
    for seed in range(6):
        text = walked(grammar, seed)
        if text is None:
            continue
        num_ended += 1
        assert judge.is_valid(json.loads(text, parse_float=_number)), text
        if name not in BEYOND:
            adapter.validate_json(text)
    assert num_ended


@pytest.mark.parametrize("name", CASES)
def test_what_a_class_writes_has_its_form(name: str) -> None:
    """The schema of what is written, which requires members with defaults."""
    schema = _adapter(CASES[name]).json_schema(mode="serialization")
    judge = jsonschema_rs.validator_for(schema)
    text = next(filter(None, (walked(Grammar.json_schema(schema), seed) for seed in range(20))))
    assert judge.is_valid(json.loads(text, parse_float=_number)), text

"""What the objects of a request have in common: strict types, members that are all known, and
unions of which a refusal names the member that was meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    model_validator,
)

from edge_spec.apps.server.field_names import OtherNames

MAX_INT = 2**31 - 1
JsonObject = dict[str, JsonValue]


def whole(value: Any) -> Any:
    """Returns a number such as 100.0 as the whole number that it is: JSON has numbers alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1, le=MAX_INT)]


def _closed(schema: JsonObject, kind: type[Body]) -> None:
    """Says in the description whether there may be members that are no fields."""
    if not kind.other_names.keeps_others:
        schema["additionalProperties"] = False


class Body(BaseModel):
    """Takes its fields by their names, and by those that other servers have for them."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_closed
    )
    other_names: ClassVar[OtherNames] = OtherNames()

    @model_validator(mode="before")
    @classmethod
    def _knows_members(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = [field.alias or name for name, field in cls.model_fields.items()]
        return cls.other_names.read(given, taken)


def chosen_by(tag: Callable[[Any], str | None], send: str) -> Discriminator:
    """Finds the member of a union that is meant, so that a refusal is of this one.

    tag: of the member; None: there is none. send: what a refusal says to send then.
    """
    return Discriminator(tag, custom_error_type="no_member", custom_error_message=f"send {send}")


def by_kind(
    send: str, kinds: Mapping[type, str], types: Mapping[str | None, str] | None = None
) -> Discriminator:
    """Finds the member by what JSON calls the value.

    kinds: the tag of each. types: the tags of objects by their `type`; None: of one without.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, dict) and types is not None:
            kind = value.get("type")
            return types.get(kind) if isinstance(kind, str | None) else None
        return kinds.get(type(value))

    return chosen_by(tag, send)

"""A number that is not finite passes through messages and JSON as it is, or is refused by name if a caller gives it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec
import pytest
from attn.v1 import training_pb2
from attn_core.errors import InvalidValue
from attn_schema.catalog import MechanismOption
from attn_schema.codec import from_message, message_class, to_message, wire_fields
from attn_schema.json_text import json_text, number
from attn_schema.model import ModelConfig
from attn_schema.output import to_json
from attn_schema.schema import Checked, FieldInfo, Schema, element_of
from attn_schema.training import TrainingConfig
from cases import each
from google.protobuf import json_format

VALUES = [math.nan, math.inf, -math.inf]


def nouns() -> list[type[Any]]:
    """All nouns that have a message."""
    found, pending = list[type[Any]](), [Schema]
    while pending:
        pending += (own := pending.pop().__subclasses__())
        found += own
    return [noun for noun in found if noun.__module__.startswith("attn_schema.") and has_message(noun)]


def has_message(noun: type[Any]) -> bool:
    try:
        return message_class(noun) is not None
    except LookupError:
        return False


def floats() -> Iterator[tuple[type[Any], FieldInfo]]:
    """Every field of a noun that holds numbers."""
    for noun in nouns():
        for info in wire_fields(noun):
            parts = get_args(info.kind) if get_origin(info.kind) in (tuple, dict) else (info.kind,)
            if any(element_of(part).kind is float for part in parts if part is not Ellipsis):
                yield noun, info


def holding(noun: type[Any], info: FieldInfo, value: float) -> Any:
    """A message of the noun with this number in the field, and something in the fields that have no default."""
    message = message_class(noun)()
    for other in wire_fields(noun):
        if other.required and other.kind in (str, int, float):
            setattr(message, other.name, other.kind("1"))
        elif other.required and get_origin(other.kind) is not tuple:
            getattr(message, other.name).SetInParent()
    if get_origin(info.kind) is dict:
        getattr(message, info.name)["1" if get_args(info.kind)[0] is str else 1] = value
    elif get_origin(info.kind) is tuple:
        getattr(message, info.name).append(value)
    else:
        setattr(message, info.name, value)
    return message


@pytest.mark.parametrize("value", VALUES, ids=str)
@each("noun,info", floats())
def test_every_number_of_every_noun(noun: type[Any], info: FieldInfo, value: float) -> None:
    message = holding(noun, info, value)
    if issubclass(noun, Checked):
        with pytest.raises(InvalidValue) as caught:
            from_message(noun, message)
        assert str(caught.value.metadata["field"]).startswith(info.name)
        return
    made = from_message(noun, message)
    assert repr(getattr(to_message(made), info.name)) == repr(getattr(message, info.name))
    for text in (json_text(made), to_json(made)):
        plain = json.loads(text, parse_constant=pytest.fail)[info.name]
        (written,) = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else (plain,)
        assert repr(number(written)) == repr(value)
        assert written == json_format.MessageToDict(training_pb2.Metrics(values={"x": value}))["values"]["x"]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_plain_values_in_messages_hold_none(value: float) -> None:
    message = training_pb2.ModelConfig(family="decoder")
    message.options["scale"] = value
    with pytest.raises(InvalidValue) as caught:
        from_message(ModelConfig, message)
    assert caught.value.metadata["field"] == "options"
    sent = to_message(MechanismOption(name="scale", type="float", default_value=value))
    assert isinstance(from_message(MechanismOption, sent).default_value, str)


def test_the_text_of_finite_numbers_is_that_of_earlier_versions() -> None:
    """By which repeated submissions are recognised."""
    config = TrainingConfig(model=ModelConfig(options={"b": 1.5, "a": [2, {"z": None, "y": True}]}))
    assert json_text(config) == msgspec.json.encode(config, order="deterministic").decode()

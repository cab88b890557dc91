"""Nouns to protobuf messages and back, by the names of their fields.

A noun is the message of the same name in package `attn.v1` (`MESSAGES` lists those that are the response of a call).
Enumerations are matched by the names of their members, `FinishReason.STOP` and `FINISH_REASON_STOP`; absent fields are
the noun's defaults; a tuple in a oneof is a message with one repeated field, as protobuf has no repeated oneof fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar, cast, get_args

import msgspec
from attn.v1 import catalog_pb2, common_pb2, inference_pb2, model_pb2, training_pb2
from attn_core.errors import InvalidValue
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from attn_schema.schema import FieldInfo, element_of, fields_of, is_enum, is_noun

Noun = TypeVar("Noun", bound=msgspec.Struct)

MODULES = (common_pb2, inference_pb2, model_pb2, catalog_pb2, training_pb2)
MESSAGES = {
    "AttentionMap": "AttentionMapsResponse",
    "Embeddings": "EmbedResponse",
    "EngineStats": "GetEngineStatsResponse",
    "OutputDelta": "GenerateResponse",
    "Tokenization": "TokenizeResponse",
}
"""Nouns whose message has another name, because it is the whole response of a call."""

JSON_MESSAGES = ("google.protobuf.Struct", "google.protobuf.Value")
UNKNOWN = "UNKNOWN"
"""The member of an enumeration that stands for values newer than this version."""

RANGES = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number from -2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_INT64: "a whole number from -2^63 to 2^63 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 2^64 - 1",
}


@functools.cache
def message_class(noun: type[msgspec.Struct]) -> type[Message]:
    """The class of a noun's message; raises `LookupError` for a noun without one."""
    name = MESSAGES.get(noun.__name__, noun.__name__)
    for module in MODULES:
        if hasattr(module, name):
            return cast("type[Message]", getattr(module, name))
    raise LookupError(f"{noun.__name__} has no message in attn.v1")


@functools.cache
def wire_fields(noun: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """The fields of a noun that its message has."""
    return tuple(info for info in fields_of(noun) if info.extra.get("wire", True))


def to_message(value: msgspec.Struct) -> Any:
    """The noun as its message; raises `InvalidValue` for a number that the message's field cannot hold."""
    message = message_class(type(value))()
    _fill(message, value)
    return message


def from_message(noun: type[Noun], message: Message) -> Noun:
    """The noun in a message; raises what making the noun raises, such as `InvalidValue`."""
    fields = message.DESCRIPTOR.fields_by_name
    values = {
        info.name: _read(info, fields[info.name], getattr(message, info.name))
        for info in wire_fields(noun)
        if _is_present(message, fields[info.name])
    }
    for info in wire_fields(noun):
        if info.required and info.name not in values:
            raise InvalidValue.of(info.name, None, "a value; it has no default")
    return noun(**values)


def _is_present(message: Message, field: Any) -> bool:
    return message.HasField(field.name) if field.has_presence else True


def _fill(message: Message, value: msgspec.Struct) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    for info in wire_fields(type(value)):
        item = getattr(value, info.name)
        field = fields[info.name]
        if item is None or item is msgspec.UNSET or (field.has_presence and not info.required and item == info.default):
            continue
        try:
            _set(message, field, item)
        except (ValueError, TypeError) as error:
            if isinstance(error, InvalidValue):
                raise
            raise InvalidValue.of(info.name, item, RANGES.get(field.cpp_type, "a value the field can hold")) from error


def _set(message: Any, field: Any, value: Any) -> None:
    target = getattr(message, field.name)
    if field.message_type is None:
        made = _enum_numbers(field.enum_type, value) if field.enum_type is not None else value
        if field.is_repeated:
            target.extend(made)
        else:
            setattr(message, field.name, made)
    elif isinstance(value, Mapping) and field.message_type.GetOptions().map_entry:
        target.update(value)
    elif field.is_repeated:
        for item in value:
            _fill(target.add(), item)
    else:
        target.SetInParent()
        _fill_message(target, value)


def _fill_message(target: Any, value: Any) -> None:
    if isinstance(value, datetime):
        target.FromDatetime(value)
    elif target.DESCRIPTOR.full_name in JSON_MESSAGES:
        target.CopyFrom(json_value(value, type(target)))
    elif isinstance(value, msgspec.Struct):
        _fill(target, value)
    else:
        _set(target, _only_field(target.DESCRIPTOR), value)


def json_value(value: Any, kind: Any) -> Any:
    """A plain value as a protobuf `Value` or `Struct`; what JSON cannot hold becomes text."""
    try:
        return json_format.ParseDict(msgspec.to_builtins(value), kind())
    except (json_format.ParseError, TypeError):
        return kind(string_value=str(value))


def _only_field(message: Any) -> Any:
    (field,) = message.fields
    return field


def _read(info: FieldInfo, field: Any, value: Any) -> Any:
    element = element_of(get_args(info.kind)[0]).kind if get_args(info.kind) else info.kind
    if field.message_type is None:
        if field.enum_type is not None:
            return _members(element, field, value)
        return tuple(value) if field.is_repeated else (None if info.optional and value == "" else value)
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return tuple(from_message(element, item) for item in value)
    return _read_message(info, element, value)


def _read_message(info: FieldInfo, element: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=UTC)
    if value.DESCRIPTOR.full_name in JSON_MESSAGES:
        return json_format.MessageToDict(value)
    if is_noun(info.kind):
        return from_message(info.kind, value)
    items = getattr(value, _only_field(value.DESCRIPTOR).name)
    return tuple(from_message(element, item) for item in items) if is_noun(element) else tuple(items)


def _members(kind: Any, field: Any, value: Any) -> Any:
    if field.is_repeated:
        return tuple(member for number in value if (member := _member(kind, field.enum_type, number)) is not None)
    return _member(kind, field.enum_type, value)


def _member(kind: Any, enum: Any, number: int) -> Any:
    """The member of this number; UNKNOWN, if there is one, or None for 0 and for numbers newer than this version."""
    found = enum.values_by_number.get(number)
    name = "" if found is None else found.name.removeprefix(enum_prefix(enum))
    return kind.__members__.get(name, kind.__members__.get(UNKNOWN)) if is_enum(kind) else number


def _enum_numbers(enum: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_enum_numbers(enum, item) for item in value]
    return 0 if value.name == UNKNOWN else enum.values_by_name[enum_prefix(enum) + value.name].number


def enum_prefix(enum: Any) -> str:
    """What precedes the member's name in protobuf: FINISH_REASON_ for FinishReason."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"

"""Conversion of nouns (the data classes of `attn_schema`) to protobuf messages and back, by field name.

A noun becomes the message of the same name in package `attn.v1`; `MESSAGES` lists the exceptions. The nouns of other
packages name their message class themselves, as the class variable `MESSAGE`.
Enumerations are matched by the names of their members, `FinishReason.STOP` and `FINISH_REASON_STOP`; absent fields take
the noun's defaults; a tuple in a oneof is a message with one repeated field, as protobuf has no repeated oneof fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin

import msgspec
from attn.v1 import catalog_pb2, common_pb2, inference_pb2, model_pb2, training_pb2
from attn_core.errors import InvalidValue, UserError
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from attn_schema.json_text import spelled
from attn_schema.schema import FieldInfo, element_of, fields_of, is_noun

Noun = TypeVar("Noun", bound=msgspec.Struct)

MODULES = (common_pb2, inference_pb2, model_pb2, catalog_pb2, training_pb2)
MESSAGES = {
    "AttentionMap": "AttentionMapsResponse",
    "Embeddings": "EmbedResponse",
    "EngineStats": "GetEngineStatsResponse",
    "OutputDelta": "GenerateResponse",
    "Tokenization": "TokenizeResponse",
}
"""The nouns whose message has a different name, because it is the whole response of an RPC."""

JSON_MESSAGES = ("google.protobuf.Struct", "google.protobuf.Value")
UNKNOWN = "UNKNOWN"
"""The enumeration member that represents values which this version does not know."""

RANGES = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number from -2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_INT64: "a whole number from -2^63 to 2^63 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 2^64 - 1",
}


class InvalidMessage(UserError):  # noqa: N818 - named as its family in attn_core.errors
    """The bytes are not the protobuf message that is expected."""

    reason = "INVALID_MESSAGE"


@dataclass(frozen=True)
class _Codec:
    """The conversion of one field: `read` turns the message's value into the noun's, `write` sets it in a message."""

    name: str
    default: Any
    presence: bool
    skips_default: bool
    holds_none: bool
    allowed: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


@functools.cache
def message_class(noun: type[msgspec.Struct]) -> type[Message]:
    """The protobuf message class of a noun; raises `LookupError` for a noun without a message."""
    own = getattr(noun, "MESSAGE", None)
    if own is not None:
        return cast("type[Message]", own)
    name = MESSAGES.get(noun.__name__, noun.__name__)
    for module in MODULES:
        if hasattr(module, name):
            return cast("type[Message]", getattr(module, name))
    raise LookupError(f"{noun.__name__} has no message in attn.v1")


@functools.cache
def wire_fields(noun: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """The fields of a noun that its protobuf message carries."""
    return tuple(info for info in fields_of(noun) if info.extra.get("wire", True))


def require_wire(value: msgspec.Struct) -> None:
    """Raise `InvalidValue` if a field that the noun's message does not carry differs from its default.

    Such a value would never reach the server.
    """
    sent = {info.name for info in wire_fields(type(value))}
    for info in fields_of(type(value)):
        given = getattr(value, info.name)
        if info.name not in sent and given != info.default:
            raise InvalidValue.of(info.name, given, "only what the server was started with, as no request carries it")


def to_message(value: msgspec.Struct) -> Any:
    """The protobuf message of a noun; raises `InvalidValue` for a number that the message's field cannot hold."""
    message = message_class(type(value))()
    _fill(message, value)
    return message


def encode(value: msgspec.Struct) -> bytes:
    """The bytes of a noun's message; raises as `to_message`."""
    return cast("bytes", to_message(value).SerializeToString())


def parsed(noun: type[msgspec.Struct], data: bytes) -> Message:
    """The message of a noun from its bytes; raises `InvalidMessage`, and `InvalidValue` for a field that was removed.

    Other fields that this version does not know are let through, as protobuf does.
    """
    kind = message_class(noun)
    try:
        message = kind.FromString(data)
    except Exception as error:
        text = f"the request is not a valid message {kind.DESCRIPTOR.name}: wrong bytes, or text that is not UTF-8"
        raise InvalidMessage(text, expected=kind.DESCRIPTOR.full_name) from error
    if removed := removed_fields(noun):
        unknown = UnknownFieldSet(message)
        for number in (unknown[place].field_number for place in range(len(unknown))):
            if number in removed:
                raise InvalidValue.of(removed[number], "a value", "none; this option was removed")
    return message


@functools.cache
def removed_fields(noun: type[msgspec.Struct]) -> dict[int, str]:
    """The names of the removed fields of a noun's message by number: its .proto reserves both, in the same order."""
    described = DescriptorProto()
    message_class(noun).DESCRIPTOR.CopyToProto(described)
    numbers = [number for part in described.reserved_range for number in range(part.start, part.end)]
    return dict(zip(numbers, described.reserved_name, strict=True))


def from_message(noun: type[Noun], message: Message) -> Noun:
    """The noun that a protobuf message holds; raises what the noun's constructor raises, such as `InvalidValue`."""
    values = {}
    for codec in _codecs(noun):
        if codec.presence and not message.HasField(codec.name):
            continue
        value = codec.read(getattr(message, codec.name))
        if value is not msgspec.UNSET:
            values[codec.name] = value
    for info in wire_fields(noun):
        if info.required and info.name not in values:
            raise InvalidValue.of(info.name, None, "a value; it has no default")
    return noun(**values)


def _fill(message: Message, value: msgspec.Struct) -> None:
    for codec in _codecs(type(value)):
        item = getattr(value, codec.name)
        if item is msgspec.UNSET or (codec.skips_default and item == codec.default):
            continue
        if item is None and not codec.holds_none:
            continue
        try:
            codec.write(message, item)
        except (ValueError, TypeError) as error:
            if isinstance(error, InvalidValue):
                raise
            raise InvalidValue.of(codec.name, item, codec.allowed) from error


@functools.cache
def _codecs(noun: type[msgspec.Struct]) -> tuple[_Codec, ...]:
    descriptors = message_class(noun).DESCRIPTOR.fields_by_name
    return tuple(_codec(info, descriptors[info.name]) for info in wire_fields(noun))


def _codec(info: FieldInfo, field: Any) -> _Codec:
    read, write = _field_kind(info, field)
    return _Codec(
        name=info.name,
        default=info.default,
        presence=field.has_presence,
        skips_default=field.has_presence and not info.required,
        holds_none=field.message_type is not None and field.message_type.full_name in JSON_MESSAGES,
        allowed=RANGES.get(field.cpp_type, "a value the field can hold"),
        read=read,
        write=write,
    )


Kind: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]
"""The functions that read a field from a message and write it to a message."""


def _field_kind(info: FieldInfo, field: Any) -> Kind:
    """The functions that read and write a field, chosen by its types in the noun and in the message."""
    name = info.name
    element = element_of(get_args(info.kind)[0]).kind if get_origin(info.kind) is tuple else info.kind
    if field.message_type is not None:
        return _message_kind(name, element, field)
    if field.enum_type is not None:
        return _enum_kind(name, element, field)
    if field.is_repeated:
        return tuple, lambda target, value: getattr(target, name).extend(value)
    empty_is_none = info.optional and info.kind is str and not field.has_presence
    return (lambda value: value or None) if empty_is_none else _same, _setter(name)


def _message_kind(name: str, element: Any, field: Any) -> Kind:
    message = field.message_type
    kind: Kind
    if message.GetOptions().map_entry:
        kind = dict, lambda target, value: getattr(target, name).update(value)
    elif message.full_name == "google.protobuf.Timestamp":
        kind = _datetime, lambda target, value: getattr(target, name).FromDatetime(value)
    elif message.full_name in JSON_MESSAGES:
        kind = partial(_plain_json, name), lambda target, value: _set_json(getattr(target, name), value)
    elif field.is_repeated:
        kind = (
            lambda value: tuple(from_message(element, item) for item in value),
            lambda target, value: _add_all(getattr(target, name), value),
        )
    elif is_noun(element) and message is message_class(element).DESCRIPTOR:
        kind = partial(_read_part, element, name), lambda target, value: _fill_part(target, name, value)
    else:
        kind = _wrapped_kind(name, element, message)
    return kind


def _enum_kind(name: str, kind: Any, field: Any) -> Kind:
    """Reads and writes enumeration members by name. 0 is an absent value; a number that this version does not know
    becomes UNKNOWN if there is such a member, else raises `InvalidValue`.
    """
    enum = field.enum_type
    numbers = {member: enum.values_by_name.get(enum_prefix(enum) + member.name) for member in kind}
    members = {0: msgspec.UNSET} | {value.number: member for member, value in numbers.items() if value is not None}

    def member(number: int) -> Any:
        if number in members:
            return members[number]
        if UNKNOWN in kind.__members__:
            return kind.__members__[UNKNOWN]
        raise InvalidValue.of(name, number, f"a value of {enum.name}")

    def number(value: Any) -> int:
        found = numbers[value]
        return 0 if found is None else int(found.number)

    if not field.is_repeated:
        return member, lambda target, value: setattr(target, name, number(value))
    return (
        lambda value: tuple(found for item in value if (found := member(item)) is not msgspec.UNSET),
        lambda target, value: getattr(target, name).extend(map(number, value)),
    )


def _wrapped_kind(name: str, element: Any, message: Any) -> Kind:
    """Reads and writes a tuple that is stored as a message with one repeated field."""
    (inner,) = message.fields

    def read(value: Any) -> tuple[Any, ...]:
        items = getattr(value, inner.name)
        return tuple(from_message(element, item) for item in items) if is_noun(element) else tuple(items)

    def write(target: Any, value: Any) -> None:
        part = getattr(target, name)
        part.SetInParent()
        items = getattr(part, inner.name)
        if is_noun(element):
            _add_all(items, value)
        else:
            items.extend(value)

    return read, write


def _same(value: Any) -> Any:
    return value


def _datetime(value: Any) -> datetime:
    return cast("datetime", value.ToDatetime(tzinfo=UTC))


def _setter(name: str) -> Callable[[Any, Any], None]:
    return lambda target, value: setattr(target, name, value)


def _read_part(noun: Any, name: str, message: Message) -> Any:
    try:
        return from_message(noun, message)
    except InvalidValue as error:
        error.metadata["field"] = noun.path_in(name, str(error.metadata.get("field")))
        raise


def _fill_part(target: Any, name: str, value: Any) -> None:
    part = getattr(target, name)
    part.SetInParent()
    _fill(part, value)


def _add_all(items: Any, values: Any) -> None:
    for value in values:
        _fill(items.add(), value)


def _plain_json(name: str, value: Any) -> Any:
    """The plain value of a protobuf `Struct` or `Value`; raises `InvalidValue` for a number that is not finite."""
    try:
        return json_format.MessageToDict(value)
    except (json_format.SerializeToJsonError, ValueError) as error:
        raise InvalidValue.of(name, "NaN or an infinite number", "finite numbers") from error


def _set_json(target: Any, value: Any) -> None:
    target.SetInParent()
    target.CopyFrom(json_value(value, type(target)))


def json_value(value: Any, kind: Any) -> Any:
    """A plain value as a protobuf `Value` or `Struct`; a value that JSON cannot represent is stored as its text."""
    try:
        return json_format.ParseDict(spelled(msgspec.to_builtins(value)), kind())
    except (json_format.ParseError, TypeError):
        return kind(string_value=str(value))


def enum_prefix(enum: Any) -> str:
    """The prefix of member names in a protobuf enumeration: FINISH_REASON_ for FinishReason."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"

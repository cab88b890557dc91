"""Every gRPC call as JSON over HTTP: POST /attn.v1.SERVICE/METHOD with the request in protobuf's JSON form.

The paths are those of gRPC and of the Connect protocol. A streaming call sends one JSON line per message,
{"result": ...}, and {"error": ...} if it fails, like grpc-gateway.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from html import escape
from typing import Any

import attn_schema
import msgspec
from attn_core.errors import InvalidValue, UnknownName
from attn_gateway import Calls
from attn_schema import methods
from attn_schema.codec import from_message, message_class, to_message
from attn_schema.methods import Row
from attn_schema.schema import fields_of, is_noun
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from attn_openai.caller import HttpCaller

TENSOR = "attn.v1.Tensor"
LISTS = "lists"
"""The value of the query parameter `tensors` that requests nested lists instead of base64."""

JSON_TYPES = {
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "format": "int64"},
    FieldDescriptor.CPPTYPE_INT64: {"type": "string", "format": "int64"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "string", "format": "uint64"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
}
KNOWN_MESSAGES: dict[str, dict[str, Any]] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Duration": {"type": "string"},
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.Value": {},
}
"""JSON schemas of the messages whose JSON form is not an object of their fields."""


def row_of(service: str, method: str, calls: Calls) -> Row:
    """The row of a path; raises `UnknownName`."""
    path = f"/{service}/{method}"
    if path not in calls.rows:
        raise UnknownName.of("path", path, calls.rows)
    return calls.rows[path]


def read_message(noun: type[msgspec.Struct], values: dict[str, Any]) -> Message:
    """Parse a noun's message from its JSON form, with either spelling of its fields; raises `InvalidValue`."""
    try:
        return json_format.ParseDict(values, message_class(noun)())
    except (json_format.ParseError, TypeError, ValueError) as error:
        raise InvalidValue(f"body: {error}", field="body") from error


def shown(message: Message, *, lists: bool) -> dict[str, Any]:
    """A message in JSON form, with the proto names of its fields; with `lists`, tensors have `values`, not `data`."""
    values: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    if lists:
        _unpack_tensors(message, values)
    return values


def _unpack_tensors(message: Message, values: dict[str, Any]) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        parts, targets = ([value], [values[field.name]]) if not field.is_repeated else (value, values[field.name])
        for part, target in zip(parts, targets, strict=True):
            if field.message_type.full_name == TENSOR:
                tensor = from_message(attn_schema.Tensor, part)
                del target["data"]
                target["values"] = tensor.view().tolist() if math.prod(tensor.shape) else []
            elif isinstance(target, dict):
                _unpack_tensors(part, target)


async def call(row: Row, request: Message, caller: HttpCaller, *, lists: bool) -> dict[str, Any]:
    """Make a call with a single response."""
    return await _encoded(row, await caller.unary(row, request), lists=lists)


async def stream(
    row: Row, request: Message, caller: HttpCaller, *, lists: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Make a call with a stream of responses, each yielded as `result`."""
    async with aclosing(caller.stream(row, request)) as answers:
        async for answer in answers:
            yield {"result": await _encoded(row, answer, lists=lists)}


async def _encoded(row: Row, answer: msgspec.Struct, *, lists: bool) -> dict[str, Any]:
    """A response in JSON form; converted in a thread if it may be large."""
    if row.bulk:
        return await asyncio.to_thread(lambda: shown(to_message(answer), lists=lists))
    return shown(to_message(answer), lists=lists)


def openapi(calls: Calls, paths: dict[str, str], requests: dict[str, type[msgspec.Struct]], version: str) -> Any:
    """The OpenAPI document of all calls, and of `paths` ("POST /v1/...": description) with their `requests` by path."""
    schemas: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    refs, components = msgspec.json.schema_components(
        list(requests.values()), ref_template="#/components/schemas/{name}"
    )
    schemas |= components
    bodies = dict(zip(requests, refs, strict=True))
    for key, summary in paths.items():
        method, path = key.split()
        path = path.replace(":path}", "}")
        entry: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The response."}}}
        if "{name}" in path:
            entry["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if path in bodies:
            entry["requestBody"] = _json(bodies[path])
        entries[path] = {method.lower(): entry}
    for path, row in sorted(calls.rows.items()):
        answer = _reference_of(row.response, schemas)
        if row.streams:
            described = {"description": "One JSON line per message.", "content": {"application/x-ndjson": {
                "schema": {"type": "object", "properties": {"result": answer}}}}}  # fmt: skip
        else:
            described = {"description": "The response.", **_json(answer)}
        entries[path] = {
            "post": {
                "summary": f"The gRPC method {row.service}.{row.name}.",
                "tags": [row.service],
                "requestBody": _json(_reference_of(row.request, schemas)),
                "responses": {"200": described},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "attn", "version": version},
        "paths": entries,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"bearer": []}],
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _reference_of(noun: type[msgspec.Struct], schemas: dict[str, Any]) -> dict[str, Any]:
    message: Any = message_class(noun).DESCRIPTOR
    return _reference(message, schemas)


def _reference(message: Descriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a message, which is added to `schemas` with those that it needs."""
    if message.full_name in KNOWN_MESSAGES:
        return KNOWN_MESSAGES[message.full_name]
    if message.full_name not in schemas:
        schemas[message.full_name] = schema = {"type": "object", "additionalProperties": False}
        descriptions = _descriptions().get(message.full_name, {})
        schema["properties"] = {
            field.name: _field(field, schemas)
            | ({"description": descriptions[field.name]} if field.name in descriptions else {})
            for field in message.fields
        }
    return {"$ref": f"#/components/schemas/{message.full_name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _single(kind.fields_by_name["value"], schemas)}
    single = _single(field, schemas)
    return {"type": "array", "items": single} if field.is_repeated else single


def _single(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        return dict(_reference(field.message_type, schemas))
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "contentEncoding": "base64"}
    return dict(JSON_TYPES[field.cpp_type])


@cache
def _descriptions() -> dict[str, dict[str, str]]:
    """The descriptions of message fields in attn-schema, by the names of message and field."""
    found: dict[str, dict[str, str]] = {}
    for noun in (*vars(attn_schema).values(), *vars(methods).values()):
        if is_noun(noun):
            try:
                message = message_class(noun).DESCRIPTOR.full_name
            except LookupError:
                continue
            found[message] = {info.name: info.description for info in fields_of(noun) if info.description}
    return found


def page(document: dict[str, Any]) -> str:
    """The document as one HTML page, in the style of the web pages."""
    paths = [
        _details(f"{method.upper()} {path}", entry.get("requestBody", {}).get("content", {}), entry["summary"])
        for path, methods in document["paths"].items()
        for method, entry in methods.items()
    ]
    schemas = [_details(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><title>attn over HTTP</title>"
        "<link rel='icon' href='/ui/icon.svg'><link rel='stylesheet' href='/ui/style.css'><main><h1>attn over HTTP</h1>"
        "<p>The same as data: <a href='/openapi.json'>openapi.json</a>. The pages: <a href='/ui/'>/ui</a>.</p>"
        f"<section class='card'><h2>Paths</h2>{''.join(paths)}</section>"
        f"<section class='card'><h2>Schemas</h2>{''.join(schemas)}</section></main>"
    )


def _details(title: str, value: Any, summary: str = "") -> str:
    text = escape(msgspec.json.format(msgspec.json.encode(value)).decode()) if value else ""
    head = f"<summary><code>{escape(title)}</code> {escape(summary)}</summary>"
    return f"<details>{head}<pre>{text}</pre></details>" if text else f"<p>{head[9:-10]}</p>"

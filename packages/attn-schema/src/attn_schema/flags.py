"""Command-line options derived from the fields of nouns, the data classes of `attn_schema`.

    @with_flags
    def generate(*, model: Annotated[str, typer.Argument()], sampling: SamplingParams) -> None: ...

A parameter whose type is a noun becomes one option for each field, such as `--max-new-tokens`, with the field's
description and default as help. `--config FILE` reads the same fields from a table with the parameter's name; flags
override the file.

    @with_flags(top="training", defaults=recipe_values)

puts the fields of `training` at the top level of the file; `defaults(options)` returns the values of fields that
neither the file nor a flag sets.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

import typer
from attn_core.errors import InvalidValue
from attn_core.options import parse_options

from attn_schema.config_file import read_config, require_known
from attn_schema.schema import FieldInfo, Schema, fields_of, is_enum, is_mapping, is_noun
from attn_schema.text_files import read_text

CONFIG = "config"

Defaults: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def with_flags(
    function: Callable[..., Any] | None = None, *, top: str = "", defaults: Defaults | None = None
) -> Callable[..., Any]:
    """Turn a function into a typer command whose noun parameters are command-line options; see the module."""
    if function is None:
        return functools.partial(with_flags, top=top, defaults=defaults)
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    nouns: dict[str, type[Schema]] = {name: hints[name] for name in parameters if is_noun(hints[name])}
    own = [parameter.replace(annotation=hints[name]) for name, parameter in parameters.items() if name not in nouns]
    tables = [name for name in nouns if name != top]
    for info in fields_of(nouns[top]) if top else ():
        tables += [info.name] if is_noun(info.kind) else []
    config = Annotated[Path | None, typer.Option(help=_config_help(tables), metavar="FILE")]

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        path = given.pop(CONFIG)
        file = read_config(path) if path else {}
        own_fields = [info.name for info in fields_of(nouns[top])] if top else []
        require_known(file, [*(name for name in nouns if name != top), *own_fields], f"table of {path}")
        if top:
            inner = {name: file.pop(name) for name in nouns if name in file}
            file = {**inner, top: merged_values(defaults(given) if defaults else {}, file)}
        made = {name: _noun(noun, name, given, file.get(name, {})) for name, noun in nouns.items()}
        return function(**{item.name: given[item.name] for item in own}, **made)

    options: dict[str, inspect.Parameter] = {}
    for noun in nouns.values():
        for info in flag_fields(noun):
            options.setdefault(info.name, _parameter(info))  # several nouns may have an option of the same name
    config_option = inspect.Parameter(CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config)
    everything = [*own, *options.values(), config_option]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        sorted((item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in everything), key=_is_optional)
    )
    command.__annotations__ = {item.name: item.annotation for item in everything}
    return command


def _config_help(tables: Sequence[str]) -> str:
    listed = f": tables {', '.join(tables)}" if tables else ""
    return f"TOML or YAML file with options{listed}. Options on the command line win."


def _is_optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def flag_fields(noun: type[Schema]) -> Iterator[FieldInfo]:
    """The fields of a noun that have a command-line flag, including the fields of nested nouns."""
    for info in fields_of(noun):
        if info.extra.get("flag", True):
            if is_noun(info.kind):
                yield from flag_fields(info.kind)
            else:
                yield info


def _parameter(info: FieldInfo) -> inspect.Parameter:
    flag = info.name.replace("_", "-")
    can_be_off = info.kind is bool and (info.default or info.optional)
    names = [f"--{flag}/--no-{flag}" if can_be_off else f"--{flag}"]
    if short := info.extra.get("short"):
        names.append(short)
    option = typer.Option(
        *names,
        help=_help(info),
        metavar=info.extra.get("metavar") or _metavar(info),
        envvar=info.extra.get("envvar"),
        rich_help_panel=info.extra.get("panel"),
        show_default=_shown(info.default),
    )
    return inspect.Parameter(
        info.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_flag_type(info), option]
    )


def _help(info: FieldInfo) -> str:
    if get_origin(info.kind) is not Literal and not is_enum(info.kind) and info.allowed:
        return f"{info.description} ({info.allowed})"
    return info.description


def _metavar(info: FieldInfo) -> str | None:
    if info.extra.get("file"):
        return "FILE"
    if is_mapping(info.kind):
        return "KEY=VALUE"
    return info.allowed.replace(", ", "|") if get_origin(info.kind) is Literal or is_enum(info.kind) else None


def _shown(default: Any) -> Any:
    return False if default in (None, (), {}, False, "") else str(getattr(default, "value", default))


def _flag_type(info: FieldInfo) -> Any:
    """The type that typer parses. The noun checks choices and bounds, so that wrong values give one kind of message."""
    if get_origin(info.kind) is tuple:
        return list[_scalar(get_args(info.kind)[0])] | None  # type: ignore[misc]
    if is_mapping(info.kind):
        return list[str] | None
    return (Path if info.extra.get("file") else _scalar(info.kind)) | None


def _scalar(kind: Any) -> Any:
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return bare if bare in (int, float, bool, Path) else str


def _noun(noun: type[Schema], name: str, given: dict[str, Any], file: Any) -> Schema:
    """The noun with the values of the file's table, overridden by the flags that were given."""
    if not isinstance(file, Mapping):
        raise InvalidValue.of(name, file, f"a table with fields of {noun.__name__}")
    return noun.from_mapping(_merged(noun, given, file), name)


def _merged(noun: type[Schema], given: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(file)
    for info in fields_of(noun):
        if not info.extra.get("flag", True):
            continue
        if is_noun(info.kind):
            inner = _merged(info.kind, given, values.get(info.name) or {})
            if inner:
                values[info.name] = inner
        elif (value := given.get(info.name)) is not None and value != []:
            values[info.name] = _parsed(info, value)
            if is_mapping(info.kind):
                values[info.name] = {**(file.get(info.name) or {}), **values[info.name]}
    return values


def merged_values(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; where both have a value that is no mapping, that of `over` is used."""
    values = dict(base)
    for name, value in over.items():
        old = values.get(name)
        values[name] = merged_values(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return values


def _parsed(info: FieldInfo, value: Any) -> Any:
    if info.extra.get("file"):
        return _content(info, value)
    if is_mapping(info.kind):
        return dict(_pair(info, text) for text in value)
    return tuple(value) if isinstance(value, list) else value


def _pair(info: FieldInfo, text: str) -> tuple[Any, Any]:
    """The key and value of `KEY=VALUE`; a value of type Any is parsed as JSON if possible, else kept as text."""
    if get_args(info.kind)[1] is Any:
        return next(iter(parse_options([text], f"--{info.name.replace('_', '-')}").items()))
    key, _, value = text.partition("=")
    kinds = [_scalar(kind) for kind in get_args(info.kind)]
    try:
        return kinds[0](key), kinds[1](value)
    except ValueError:
        raise InvalidValue.of(info.name, text, "KEY=VALUE") from None


def _content(info: FieldInfo, path: Path) -> str:
    return read_text(path, info.name)

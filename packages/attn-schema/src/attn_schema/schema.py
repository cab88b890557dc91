"""The base classes of all data classes of attn, called nouns.

A noun is a frozen msgspec Struct whose fields declare their type, bounds, default and meaning:

    class Example(Schema):
        '''One line that describes the class.'''

        size: Annotated[int, Meta(ge=1, le=64, description="Number of items.")] = 8

`Meta` takes the bounds `ge`, `gt`, `le`, `lt`, `min_length`, `max_length`, a `description`, and in `extra` the settings
of single consumers: `wire` (False: not in the protobuf message), `flag` (False: no command-line option), `short`
(another spelling of the option), `metavar`, `panel`, `envvar`, `file` (True: the option names a file with the value),
`names` (the kind of the stored object that the text names, such as `MODEL`; see `references_of`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin

import msgspec
from attn_core.checks import is_number, require_choice, require_flag, require_number, require_whole, whole
from attn_core.errors import InvalidValue, UnknownName

BOUNDS = ("ge", "gt", "le", "lt")
MAX_INT32 = 2**31 - 1
"""The largest count, token id and place in a text: what a message's field of 32 bits holds."""
MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255
"""The largest path, and the largest name of a file or folder, of the usual file systems."""
MODEL, TOKENIZER, DATASET, PREPARED = "model", "tokenizer", "dataset", "prepared"
"""The values of `names` in a field's `Meta`: a model or adapter, a folder with a tokenizer.json (or a word for a
tokenizer that is learned), a dataset, and folders of prepared data with their weights."""


@dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """The description of one field of a noun. `kind` is its type without None and without `Meta`."""

    name: str
    kind: Any
    default: Any
    required: bool
    optional: bool
    description: str
    bounds: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int | None, int | None] = (None, None)

    @property
    def allowed(self) -> str:
        """The bounds or choices as text, such as "1 to 64"; empty if any value of the type is allowed."""
        if get_origin(self.kind) is Literal:
            return ", ".join(map(str, get_args(self.kind)))
        if is_enum(self.kind):
            return ", ".join(member.value for member in self.kind)
        low, high = (next((self.bounds[name] for name in names if name in self.bounds), None) for names in _ENDS)
        if low is None:
            return "" if high is None else f"at most {_short(high)}"
        start = f"above {_short(low)}" if "gt" in self.bounds else _short(low)
        if high is None:
            return start if "gt" in self.bounds else f"at least {start}"
        if "lt" in self.bounds:
            return f"{start}, below {_short(high)}"
        return f"{start}{', at most ' if 'gt' in self.bounds else ' to '}{_short(high)}"


_ENDS = (("ge", "gt"), ("le", "lt"))


def _short(number: float) -> str:
    if number >= 2**20:
        power = int(number + 1).bit_length() - 1
        if int(number) in (2**power, 2**power - 1):
            return f"2^{power}" if int(number) == 2**power else f"2^{power} - 1"
    return f"{number:g}"


def in_panel(panel: str) -> Callable[..., msgspec.Meta]:
    """A function that makes the `Meta` of fields whose options are shown in the given panel of the command's help."""

    def meta(description: str, *, short: str = "", metavar: str = "", names: str = "", **bounds: Any) -> msgspec.Meta:
        extra = {"panel": panel, "short": short, "metavar": metavar, "names": names}
        return msgspec.Meta(
            description=description, extra={key: value for key, value in extra.items() if value}, **bounds
        )

    return meta


class SchemaMeta(msgspec.StructMeta):
    """Metaclass that raises `UnknownName`, with similar names, for an unknown field, in place of a `TypeError`.

    Only the subclasses of `Checked` have it: one `Token` is made for every token, and would take three times as long.
    """

    if not TYPE_CHECKING:  # which would take its signature for that of all constructors

        def __call__(cls, *values: Any, **fields: Any) -> Any:  # noqa: N805 -- what it makes are classes
            """Construct an instance; raises `UnknownName` for a field that the class does not have."""
            try:
                return super().__call__(*values, **fields)
            except TypeError:
                unknown = next((name for name in fields if name not in cls.__struct_fields__), None)
                if unknown is None:
                    raise
                raise UnknownName.of(f"field of {cls.__name__}", unknown, cls.__struct_fields__) from None


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all nouns. Values are not checked; see `Checked`."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], place: str = "") -> Self:
        """Make an instance from values by field name, such as those of a file; nested mappings become nouns as well.

        Raises `UnknownName` for a key that is not a field, `InvalidValue` for a missing or invalid value.
        """
        known = {info.name: info for info in fields_of(cls)}
        for name in values:
            if name not in known:
                raise UnknownName.of(f"field of {place or cls.__name__}", str(name), known)
        for info in known.values():
            if info.required and info.name not in values:
                raise InvalidValue.of(f"{place}{'.' if place else ''}{info.name}", None, "a value; it has no default")
        return cls(**{name: checked(known[name], value) for name, value in values.items()})

    @classmethod
    def path_in(cls, holder: str, name: str) -> str:
        """How errors name a field of this noun in the field `holder` of a request: by its name alone."""
        del holder
        return name

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)


class Checked(Schema, frozen=True, kw_only=True, metaclass=SchemaMeta):
    """Base class of nouns that callers create (configurations and requests): values are validated at construction.

    Lists become tuples, and integers become floats in float fields. Raises `InvalidValue`, which names the field, the
    given value and the allowed values.
    """

    def __post_init__(self) -> None:
        for info in fields_of(type(self)):
            value = getattr(self, info.name)
            fit = checked(info, value)
            if fit is not value:
                msgspec.structs.force_setattr(self, info.name, fit)


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Base class of configs of models and of their parts, which are frozen dataclasses as parts can then be inherited.

    Fields are declared and checked as those of `Checked`. `plain` and `from_plain` write and read plain values.
    """

    def __post_init__(self) -> None:
        for info in fields_of(type(self)):
            value = getattr(self, info.name)
            fit = checked(info, value)
            if fit is not value:
                object.__setattr__(self, info.name, fit)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, the inverse of `from_plain`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config from plain values such as JSON's, where whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        known = {info.name: info for info in fields_of(cls)}
        for name in values:
            if name not in known:
                raise UnknownName.of(f"field of {cls.__name__}", name, known)
        for name, info in known.items():
            if info.required and name not in values:
                raise InvalidValue(f"{name}: {cls.__name__} needs it; none was given", field=name)
        return cls(**{name: whole(value) for name, value in values.items()})


def fields_of(noun: Any) -> tuple[FieldInfo, ...]:
    """The fields of a noun, in the order of declaration."""
    return _fields_of(noun)


@functools.cache
def _fields_of(noun: type[Any]) -> tuple[FieldInfo, ...]:
    hints = typing.get_type_hints(noun, include_extras=True)
    found = dataclasses.fields(noun) if issubclass(noun, PlainConfig) else msgspec.structs.fields(noun)
    return tuple(_field_info(item, hints[item.name]) for item in found)


UNSET = (dataclasses.MISSING, msgspec.NODEFAULT)


def _field_info(item: dataclasses.Field[Any] | msgspec.structs.FieldInfo, hint: Any) -> FieldInfo:
    metas: list[msgspec.Meta] = []
    kind, optional = _bare(hint, metas)
    default = item.default if item.default_factory in UNSET else item.default_factory()
    return FieldInfo(
        name=item.name,
        kind=kind,
        default=None if default in UNSET else default,
        required=default in UNSET,
        optional=optional,
        description=next((meta.description for meta in metas if meta.description), ""),
        bounds=_bounds(metas),
        extra={key: value for meta in metas for key, value in (meta.extra or {}).items()},
        lengths=_lengths(metas),
    )


def _bare(hint: Any, metas: list[msgspec.Meta]) -> tuple[Any, bool]:
    """The type without `Annotated` and None, and whether None is allowed; each `Meta` found is appended to `metas`."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        metas.extend(note for note in notes if isinstance(note, msgspec.Meta))
        return _bare(inner, metas)
    if get_origin(hint) in (Union, types.UnionType):
        branches = [branch for branch in get_args(hint) if branch not in (type(None), msgspec.UnsetType)]
        if len(branches) == 1:
            return _bare(branches[0], metas)[0], True
    return hint, False


@functools.cache
def element_of(hint: Any) -> FieldInfo:
    """The description of the elements of a sequence or mapping, as a field without a name."""
    metas: list[msgspec.Meta] = []
    kind, optional = _bare(hint, metas)
    return FieldInfo(
        name="",
        kind=kind,
        default=None,
        required=True,
        optional=optional,
        description="",
        bounds=_bounds(metas),
        lengths=_lengths(metas),
    )


def _bounds(metas: list[msgspec.Meta]) -> dict[str, float]:
    return {name: getattr(meta, name) for meta in metas for name in BOUNDS if getattr(meta, name) is not None}


def _lengths(metas: list[msgspec.Meta]) -> tuple[int | None, int | None]:
    least, most = (
        next((getattr(meta, name) for meta in metas if getattr(meta, name) is not None), None)
        for name in ("min_length", "max_length")
    )
    return least, most


def is_enum(kind: Any) -> bool:
    """Whether the type is an enumeration."""
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def is_mapping(kind: Any) -> bool:
    """Whether the type is that of mappings."""
    return get_origin(kind) in (dict, Mapping)


def is_noun(kind: Any) -> bool:
    """Whether the type is a noun, or a config."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct | PlainConfig)


def checked(info: FieldInfo, value: Any) -> Any:
    """The value converted to the field's type; raises `InvalidValue` if its type, a bound or its length is wrong."""
    if (info.optional and value is None) or value is msgspec.UNSET:
        return value
    return _checker(info.kind)(info, value)


@functools.cache
def _checker(kind: Any) -> Callable[[FieldInfo, Any], Any]:
    by_origin = {tuple: _checked_tuple, dict: _checked_mapping, Mapping: _checked_mapping, Literal: _checked_literal}
    if checker := by_origin.get(get_origin(kind)):
        return checker
    if is_enum(kind):
        return _checked_enum
    return _checked_noun if is_noun(kind) else _checked_scalar


def _checked_literal(info: FieldInfo, value: Any) -> Any:
    return require_choice(info.name, value, get_args(info.kind))


def _checked_item(element: FieldInfo, value: Any, name: str) -> Any:
    try:
        return checked(element, value)
    except InvalidValue:
        return checked(dataclasses.replace(element, name=name), value)  # raises the error with the name


def _checked_scalar(info: FieldInfo, value: Any) -> Any:
    bounds: dict[str, Any] = dict(info.bounds)
    match info.kind:
        case kind if kind is bool:
            return require_flag(info.name, value)
        case kind if kind is int:
            return require_whole(info.name, value, **bounds)
        case kind if kind is float:
            number = require_number(info.name, value, **bounds)
            return float(number) if is_number(number) else number
        case kind if kind is Path:
            return _require_path(info.name, value)
        case kind if kind is str:
            if not isinstance(value, str):
                raise InvalidValue.of(info.name, value, "text")
            _require_length(info, value, "characters")
            if "names" in info.extra:
                _require_file_names(info, value)
    return value


def _require_file_names(info: FieldInfo, value: str) -> None:
    """Raise `InvalidValue` for text that no file can have as its path."""
    if "\0" in value:
        raise InvalidValue.of(info.name, value, "text without the character NUL")
    for path in value.split(",") if info.extra["names"] == PREPARED else [value]:
        size = len(path.encode(errors="surrogatepass"))
        part = max(len(each.encode(errors="surrogatepass")) for each in path.split("/"))
        if size > MAX_PATH_BYTES or part > MAX_NAME_BYTES:
            given = f"{size} bytes, with a part of {part} between slashes"
            raise InvalidValue.of(
                info.name, given, f"at most {MAX_PATH_BYTES} bytes, with parts of at most {MAX_NAME_BYTES}"
            )


def _require_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise InvalidValue.of(name, value, "a path")
    return Path(value).expanduser()


def _checked_tuple(info: FieldInfo, value: Any) -> tuple[Any, ...]:
    element = get_args(info.kind)[0]
    if isinstance(value, str) and _bare(element, [])[0] is str:
        value = (value,)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidValue.of(info.name, value, "a list")
    _require_length(info, value, "items")
    item = element_of(element)
    if item.kind is int and isinstance(value, tuple) and _whole_within(value, item.bounds):
        return value
    fit = tuple(_checked_item(item, part, f"{info.name}[{place}]") for place, part in enumerate(value))
    return value if isinstance(value, tuple) and all(a is b for a, b in zip(fit, value, strict=True)) else fit


def _whole_within(values: tuple[Any, ...], bounds: Mapping[str, float]) -> bool:
    """Whether all values are integers from `ge` to `le`: a fast check of thousands of token ids at once."""
    if not values or any(type(value) is not int for value in values):
        return not values
    least, most = min(values), max(values)
    return bool(bounds.get("ge", least) <= least and most <= bounds.get("le", most))


def _checked_mapping(info: FieldInfo, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidValue.of(info.name, value, "a mapping")
    _require_length(info, value, "items")
    keys, values = map(element_of, get_args(info.kind))
    return {
        _checked_item(keys, key, info.name): _checked_item(values, item, f"{info.name}[{key!r}]")
        for key, item in value.items()
    }


def _checked_enum(info: FieldInfo, value: Any) -> enum.Enum:
    """The enumeration member, given as itself or by its value; True and False are read as "true" and "false"."""
    kind: type[enum.Enum] = info.kind
    if isinstance(value, kind):
        return value
    try:
        return kind(str(value).lower())
    except ValueError:
        raise InvalidValue.of(info.name, value, "one of " + ", ".join(repr(m.value) for m in kind)) from None


def _checked_noun(info: FieldInfo, value: Any) -> Any:
    if isinstance(value, info.kind):
        return value
    if issubclass(info.kind, PlainConfig):
        return info.kind.from_plain(value)
    if isinstance(value, Mapping) and issubclass(info.kind, Schema):
        return info.kind.from_mapping(value, info.name)
    raise InvalidValue.of(info.name, value, f"a {info.kind.__name__}, or a mapping with its fields")


def _require_length(info: FieldInfo, value: Any, unit: str) -> None:
    low, high = info.lengths
    if (low is None or len(value) >= low) and (high is None or len(value) <= high):
        return
    span = f"at least {low}" if high is None else f"at most {high}" if not low else f"{low} to {high}"
    given = value if not value else f"{len(value)} {unit}"
    raise InvalidValue.of(info.name, given, f"{span} {unit}")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a field names: the path of the field, such as data.dataset, the kind of the object, and the given text."""

    field: str
    kind: str
    text: str


def references_of(noun: msgspec.Struct, place: str = "") -> Iterator[Reference]:
    """All references to stored objects in a noun and the nouns in it; fields that are empty or None name nothing."""
    for info in fields_of(type(noun)):
        value = getattr(noun, info.name)
        if is_noun(info.kind) and value is not None:
            yield from references_of(value, f"{place}{info.name}.")
        elif "names" in info.extra and value:
            yield Reference(field=f"{place}{info.name}", kind=info.extra["names"], text=value)

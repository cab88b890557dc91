"""Generates the reference page of options, as Markdown: `python -m attn_schema.reference > docs/options.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

import msgspec

from attn_schema.schema import Checked, FieldInfo, fields_of, is_enum, is_mapping

HEAD = """# Options

What callers write: each noun of [attn-schema](../packages/attn-schema), as a flag (`--max-new-tokens`), in a file for
`--config` (below), as a field of the protobuf message of the same name, and in Python.

```toml
# attn generate --config options.toml --model smollm2-135m-instruct "Once"
[sampling]
max_new_tokens = 40
temperature = 0.7

[engine]
quantization = "int8"
```

This page is generated from the declarations: `python -m attn_schema.reference > docs/options.md`.

"""


def page() -> str:
    """The reference page of all configuration and request classes: the subclasses of `Checked`."""
    import attn_schema

    nouns = [getattr(attn_schema, name) for name in sorted(attn_schema.__all__)]
    written = [noun for noun in nouns if isinstance(noun, type) and issubclass(noun, Checked) and noun is not Checked]
    return HEAD + reference(written)


def reference(nouns: Iterable[type[msgspec.Struct]]) -> str:
    """One section for each noun: its docstring, and a table of the fields' types, defaults, bounds and descriptions."""
    return "\n".join(section(noun) for noun in nouns)


def section(noun: type[msgspec.Struct]) -> str:
    """The section of one noun."""
    rows = [_row(info) for info in fields_of(noun)]
    head = ["| field | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    return "\n".join([f"## {noun.__name__}\n", f"{inspect.getdoc(noun) or ''}\n", *head, *rows, ""])


def _row(info: FieldInfo) -> str:
    default = "required" if info.required else _value(info.default)
    cells: Sequence[str] = (f"`{info.name}`", _type(info.kind), default, info.allowed, info.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(value: Any) -> str:
    if value is None or value is msgspec.UNSET or value in ((), {}, ""):
        return ""
    if isinstance(value, msgspec.Struct):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is tuple:
        return f"list of {_type(get_args(kind)[0])}"
    if is_mapping(kind):
        key, value = get_args(kind)
        return f"map of {_type(key)} to {_type(value)}"
    if is_enum(kind) or get_origin(kind) is not None:
        args = get_args(kind)
        return _type(args[0]) if args and not isinstance(args[0], str) else "choice"
    return getattr(kind, "__name__", str(kind)).lower() if not _is_struct(kind) else kind.__name__


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


if __name__ == "__main__":
    sys.stdout.write(page())

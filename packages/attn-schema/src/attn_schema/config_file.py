"""Reading of configuration files in TOML or YAML, whose tables hold the fields of nouns."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UnknownName

from attn_schema.text_files import UTF8

SUFFIXES = (".toml", ".yaml", ".yml")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a TOML or YAML file as plain values.

    Raises `InvalidValue` for a file that cannot be read, has another suffix, or does not hold a mapping.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidValue.of("config", str(path), "a file that ends in .toml, .yaml or .yml")
    try:
        text = path.read_text(UTF8)
        values = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except (OSError, ValueError) as error:
        raise InvalidValue(f"config: {path}: {error}", field="config", given=path) from error
    if not isinstance(values, dict):
        raise InvalidValue.of("config", str(path), "a mapping of names to values")
    return values


def require_known(values: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise `UnknownName`, with similar names as suggestions, for the first key that is not in `known`."""
    for name in values:
        if name not in known:
            raise UnknownName.of(what, str(name), known)


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error

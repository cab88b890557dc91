"""Recipes: training specifications as files that come with the client, or that users write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from attn.v1 import training_pb2 as pb
from attn_core.errors import InvalidValue, UnknownName
from google.protobuf import json_format

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The recipes that come with the client."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(recipe: str) -> pb.TrainingSpec:
    """The specification in the recipe of this name, or in the TOML file at this path, whose keys are the wire's.

    TOML has no null; where an option is to be left out, "null" says so.
    Raises `UnknownName` with near names, `InvalidValue` for a file that is no specification, with the place.
    """
    path = FOLDER / f"{recipe}.toml" if recipe in recipe_names() else Path(recipe).expanduser()
    if not path.is_file():
        raise UnknownName.of("recipe or file", recipe, recipe_names())
    try:
        return json_format.ParseDict(_with_nulls(tomllib.loads(path.read_text("utf-8"))), pb.TrainingSpec())
    except (tomllib.TOMLDecodeError, json_format.ParseError, UnicodeDecodeError, OSError) as error:
        raise InvalidValue.of("--recipe", str(path), f"a training specification in TOML: {error}") from error


def _with_nulls(value: Any) -> Any:
    match value:
        case "null":
            return None
        case dict():
            return {name: _with_nulls(item) for name, item in value.items()}
        case list():
            return [_with_nulls(item) for item in value]
        case _:
            return value

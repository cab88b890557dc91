"""Recipes: training configurations as TOML files that come with the client, or that users write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UnknownName
from attn_schema.config_file import read_config
from attn_schema.training import TrainingConfig

FOLDER = Path(__file__).parent / "recipes"
PATTERN = "pattern"
"""Option of a model that names the mechanisms of its layers in turn."""


def recipe_names() -> list[str]:
    """The recipes that come with the client."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_recipe(recipe: str) -> TrainingConfig:
    """The configuration in the recipe of this name, or in the file at this path.

    Raises `UnknownName` with near names, `InvalidValue` for a file that is no configuration, with the place.
    """
    values = recipe_values(recipe)
    try:
        return TrainingConfig.from_mapping(values)
    except (UnknownName, InvalidValue) as error:
        raise type(error)(f"recipe {recipe}: {error.message}", **error.metadata) from error


def recipe_values(recipe: str) -> dict[str, Any]:
    """The values of a recipe, as its file has them. TOML has no null; "null" stands for it."""
    path = FOLDER / f"{recipe}.toml" if recipe in recipe_names() else Path(recipe).expanduser()
    if not path.is_file():
        raise UnknownName.of("recipe or file", recipe, recipe_names())
    values: dict[str, Any] = _with_nulls(read_config(path))
    return values


def recipe_under(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the recipe that options of the command line name, without what other options replace.

    A mechanism replaces the recipe's with its options and pattern; fewer steps have no more warm-up than they last; a
    dataset replaces the recipe's tokenizer and languages, unless both are paths.
    """
    if not options.get("recipe"):
        return {}
    values = recipe_values(options["recipe"])
    model, data, optimizer = (dict(values.get(part) or {}) for part in ("model", "data", "optimizer"))
    if options.get("mechanism"):
        model.pop("options", None)
        model["model_options"] = {k: v for k, v in (model.get("model_options") or {}).items() if k != PATTERN}
    if (steps := options.get("steps")) is not None and "warmup_steps" in optimizer:
        optimizer["warmup_steps"] = min(optimizer["warmup_steps"], steps)
    if (dataset := options.get("dataset")) and not (is_path(dataset) and is_path(data.get("dataset", ""))):
        data = {name: value for name, value in data.items() if name not in ("tokenizer", "languages")}
    return {**values, "model": model, "data": data, "optimizer": optimizer}


def is_path(dataset: str) -> bool:
    """Whether a dataset is a path: it has a slash, or there is such a file or folder here."""
    return "/" in dataset or (bool(dataset) and Path(dataset).expanduser().exists())


def located(dataset: str) -> str:
    """A dataset as the server needs it, which does not know the current folder: paths are absolute."""
    return str(Path(dataset).expanduser().absolute()) if is_path(dataset) else dataset


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

"""Recipes: training configurations as TOML files, either included in this package or written by users."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UnknownName
from attn_schema.config_file import read_config
from attn_schema.text_files import lines_of
from attn_schema.training import TrainingConfig

FOLDER = Path(__file__).parent / "recipes"
PATTERN = "pattern"
"""The model option that lists the mechanisms of the layers, repeated in turn."""


def recipe_names() -> list[str]:
    """The names of the recipes that are included in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_summary(name: str) -> str:
    """What an included recipe trains: the comment at the top of its file."""
    lines = lines_of((FOLDER / f"{name}.toml").read_text("utf-8"))
    return " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))


def read_recipe(recipe: str) -> TrainingConfig:
    """Read the configuration from the recipe of this name, or from the file at this path.

    Raises `UnknownName`, with similar names, for an unknown recipe or field, and `InvalidValue` for an invalid value.
    """
    values = recipe_values(recipe)
    try:
        return TrainingConfig.from_mapping(values)
    except (UnknownName, InvalidValue) as error:
        raise type(error)(f"recipe {recipe}: {error.message}", **error.metadata) from error


def recipe_values(recipe: str) -> dict[str, Any]:
    """The values in a recipe's file. TOML has no null; the string "null" is read as None."""
    path = FOLDER / f"{recipe}.toml" if recipe in recipe_names() else Path(recipe).expanduser()
    if not path.is_file():
        raise UnknownName.of("recipe or file", recipe, recipe_names())
    values: dict[str, Any] = _with_nulls(read_config(path))
    return values


def recipe_under(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the recipe that `--recipe` selects, adjusted to the other command-line options.

    With `--mechanism`, the recipe's mechanism options and pattern are dropped; with `--steps`, the warm-up is at most
    that long; with a dataset, the recipe's tokenizer and languages are dropped, unless both datasets are paths.
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
    """Whether a dataset is a path: it contains a slash, or a file or folder of that name exists locally."""
    return "/" in dataset or (bool(dataset) and Path(dataset).expanduser().exists())


def located(dataset: str) -> str:
    """A dataset as sent to the server, which has another working directory: a path is made absolute."""
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

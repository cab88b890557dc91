"""Configuration files of a checkpoint, freed of everything that asks for code to run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from attn_models.weights.strict_json import read_json_object

CONFIG_LIMIT = 4 << 20
"""Bytes. Tokenizer configurations with hundreds of special tokens reach some hundred kilobytes."""

log = logging.getLogger(__name__)
CODE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines", "custom_generate"})
"""Keys by which a Hugging Face configuration names Python code; none of them is ever followed."""


def read_config(path: Path) -> dict[str, Any]:
    """The configuration at `path` without the keys that name code, at any depth.

    Raises CheckpointInvalid when the file is no JSON object.
    """
    given = read_json_object(path, CONFIG_LIMIT)
    if asked := sorted(CODE_KEYS & given.keys()):
        log.warning("%s asks for code of its own (%s), which is never run", path, ", ".join(asked))
    config: dict[str, Any] = without_code(given)
    return config


def without_code(value: Any) -> Any:
    """A copy of a JSON value in which no object has one of CODE_KEYS."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key not in CODE_KEYS}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value

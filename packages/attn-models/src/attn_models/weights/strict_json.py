"""JSON objects from files that may be hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from attn_core.errors import CheckpointInvalid


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in the file at `path`, of at most `limit` bytes.

    Raises CheckpointInvalid for a longer file and for everything `parse_json_object` refuses.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointInvalid.of(path, f"{size} bytes of JSON; allowed: at most {limit}")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointInvalid.of(path, f"cannot be read: {error.strerror}") from error
    return parse_json_object(content, path)


def parse_json_object(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `content`; `path` is only named in errors.

    Raises CheckpointInvalid for bad UTF-8 or JSON, a key given twice, NaN or Infinity, nesting
    beyond the parser, and a value that is no object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(name for name in keys if names.count(name) > 1)
            raise CheckpointInvalid.of(path, f"the JSON key {twice!r} is given twice")
        return keys

    def refuse_constant(name: str) -> NoReturn:
        raise CheckpointInvalid.of(path, f"{name} is not JSON")

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointInvalid.of(path, f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise CheckpointInvalid.of(path, "JSON nested too deeply") from error
    except CheckpointInvalid:
        raise
    except ValueError as error:
        raise CheckpointInvalid.of(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid.of(path, f"a JSON object is needed, not {type(value).__name__}")
    return value

"""Opens files of a checkpoint folder that may be hostile: checks names, formats that run code, and JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attn_core.errors import CheckpointInvalid

UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pt2", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".distcp", ".metadata")
"""Suffixes of weight files in formats that can run code when they are read."""

_PICKLE_PROTOCOLS = tuple(bytes([0x80, protocol]) for protocol in range(1, 6))
_ZIP_MAGIC = b"PK\x03\x04"


def member(folder: Path, name: str) -> Path:
    """The path of the file `name` directly inside `folder`; the file need not exist.

    Raises CheckpointInvalid for a name with a directory in it and for a link that leaves the folder.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointInvalid.of(folder, f"{name!r} is not the name of a file directly in the folder")
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointInvalid.of(path, "is a symbolic link that leaves the checkpoint folder")
    return path


def code_format(path: Path) -> str | None:
    """The format of `path` if reading it could run code (a pickle or a zip archive), else None.

    It is determined by the first bytes, never by the name, so that a renamed file is recognised.
    """
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(_ZIP_MAGIC):
        return "a zip archive (torch.save's format, which holds a pickle)"
    # A safetensors file can begin with the same two bytes, as its header's length, but has a brace at byte 8.
    if start.startswith(_PICKLE_PROTOCOLS) and start[8:] != b"{":
        return "a pickle"
    return None


def refuse_code_format(path: Path) -> None:
    """Raises CheckpointInvalid when the file at `path` is a pickle or a zip archive, whatever its name."""
    found = code_format(path)
    if found is not None:
        rule = (
            f"is {found}, which can run code when it is read; convert it to safetensors with the program that wrote it"
        )
        raise CheckpointInvalid.of(path, rule)


def refuse_folder_without_weights(folder: Path) -> None:
    """Always raises CheckpointInvalid: the folder has no safetensors; names an unsafe file if there is one."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(UNSAFE_SUFFIXES) and path.is_file():
            refuse_code_format(path)
            raise CheckpointInvalid.of(
                path, "weights are read from safetensors only, and the folder has no safetensors file"
            )
    raise CheckpointInvalid.of(folder, "no model.safetensors and no model.safetensors.index.json")


INFINITE = {"__float__": "Infinity"}
NO_WORDS: Mapping[str, Any] = MappingProxyType({})


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in the file at `path`, of at most `limit` bytes.

    Raises CheckpointInvalid for a longer file and for everything `parse_json_object` refuses.
    """
    return parse_json_object(_read(path, limit), path)


def read_json(path: Path, limit: int) -> Any:
    """The JSON value of any type in the file at `path`, of at most `limit` bytes; raises as `read_json_object`."""
    return parse_json(_read(path, limit), path)


def _read(path: Path, limit: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointInvalid.of(path, f"{size} bytes of JSON; allowed: at most {limit}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointInvalid.of(path, f"cannot be read: {error.strerror}") from error


def parse_json_object(content: bytes, path: Path, words: Mapping[str, Any] = NO_WORDS) -> dict[str, Any]:
    """Parse the JSON object in `content`; `path` is only used in errors, `words` is as in `parse_json`.

    Raises CheckpointInvalid for a value that is not an object, and for everything `parse_json` refuses.
    """
    value = parse_json(content, path, words)
    if not isinstance(value, dict):
        raise CheckpointInvalid.of(path, f"a JSON object is needed, not {type(value).__name__}")
    return value


def parse_json(content: bytes, path: Path, words: Mapping[str, Any] = NO_WORDS) -> Any:
    """Parse the JSON value in `content`; `path` is only used in errors. `words` are values for NaN and ±Infinity.

    Raises CheckpointInvalid for bad UTF-8 or JSON, a duplicate key, NaN or Infinity unless they are among `words`, and
    nesting beyond the parser's limit.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(name for name in keys if names.count(name) > 1)
            raise CheckpointInvalid.of(path, f"the JSON key {twice!r} is given twice")
        return keys

    def constant(name: str) -> Any:
        if name not in words:
            raise CheckpointInvalid.of(path, f"{name} is not JSON")
        return words[name]

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise CheckpointInvalid.of(path, f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise CheckpointInvalid.of(path, "JSON nested too deeply") from error
    except CheckpointInvalid:
        raise
    except ValueError as error:
        raise CheckpointInvalid.of(path, f"not JSON: {error}") from error


CONFIG_LIMIT = 4 << 20
"""A limit in bytes. Tokenizer configs with hundreds of special tokens reach some hundred kilobytes."""

log = logging.getLogger(__name__)
CODE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines", "custom_generate"})
"""Keys with which a Hugging Face config names Python code; none of them is ever used."""


def read_config(path: Path) -> dict[str, Any]:
    """The config at `path` without the keys that name code, at any depth.

    The word Infinity, which older transformers versions wrote, is read as the object that newer ones write, `INFINITE`.
    Raises CheckpointInvalid when the file is not a JSON object, and for a `model_type` that is no word.
    """
    given = parse_json_object(_read(path, CONFIG_LIMIT), path, {"Infinity": INFINITE})
    kind = given.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointInvalid.of(path, f"model_type: {kind!r} is not allowed; allowed: the name of a layout")
    if found := sorted(CODE_KEYS & given.keys()):
        log.warning("%s refers to custom code (%s), which is never run", path, ", ".join(found))
    config: dict[str, Any] = without_code(given)
    return config


def without_code(value: Any) -> Any:
    """A copy of a JSON value without the keys CODE_KEYS in any of its objects."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key not in CODE_KEYS}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value

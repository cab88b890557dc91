"""Where a model's folder is."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import CheckpointInvalid, UnknownName
from attn_core.home import models_folder


def find_folder(source: str, home: Path) -> Path:
    """The model folder for an absolute path or a name under the home's models.

    Raises `UnknownName` with near names, or `CheckpointInvalid` where a path is no model folder.
    """
    given = Path(source).expanduser()
    if given.is_absolute():
        if not (given / "config.json").is_file():
            raise CheckpointInvalid.of(given, "is not a model folder: it has no config.json")
        return given
    shelf = models_folder(home)
    known = sorted(path.parent.name for path in shelf.glob("*/config.json"))
    if source not in known:
        raise UnknownName.of("model", source, known)
    return shelf / source

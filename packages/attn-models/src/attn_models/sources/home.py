"""Where fetched models and texts are kept."""

from __future__ import annotations

import os
from pathlib import Path


def attn_home() -> Path:
    """The folder of everything fetched: $ATTN_HOME, else ~/.cache/attn."""
    given = os.environ.get("ATTN_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "attn"


def model_folder(name: str, home: Path) -> Path:
    """Where the converted model `name` lies under `home`."""
    return home / "models" / name


def text_file(name: str, home: Path) -> Path:
    """Where the text `name` lies under `home`."""
    return home / "texts" / f"{name}.txt"

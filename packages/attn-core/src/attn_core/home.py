"""Where models, training jobs and their records lie on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of everything attn keeps: `ATTN_HOME`, or `~/.local/share/attn`. It may not exist yet."""
    chosen = environ.get("ATTN_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".local" / "share" / "attn"


def models_folder(home: Path) -> Path:
    """The folder of model folders, each called by the model's name."""
    return home / "models"

"""The folder where attn keeps models, training jobs and their records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from platformdirs import user_data_path


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`ATTN_HOME`, or the user's data folder (`~/.local/share/attn` on Linux). It may not exist yet."""
    chosen = environ.get("ATTN_HOME")
    return Path(chosen).expanduser() if chosen else user_data_path("attn", appauthor=False)


def models_folder(home: Path) -> Path:
    """The folder of model folders, each named after its model."""
    return home / "models"

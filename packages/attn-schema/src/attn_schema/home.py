"""The folder where attn keeps models, training jobs and their records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_data_path


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`ATTN_HOME`, or the user's data folder (`~/.local/share/attn` on Linux). It may not exist yet."""
    chosen = environ.get("ATTN_HOME")
    return Path(chosen).expanduser() if chosen else user_data_path("attn", appauthor=False)


def models_folder(home: Path) -> Path:
    """The folder of model folders, each named after its model."""
    return home / "models"


def model_folder_name(name: str) -> str:
    """The name of the folder of a model; OWNER/REPO of a hub lies in OWNER--REPO."""
    return name.replace("/", "--", 1)


def model_names(home: Path, configs: Sequence[str] = ("config.json",)) -> list[str]:
    """The names of all models of this machine, sorted: folders that have one of the files `configs`."""
    folders = {path.parent.name for name in configs for path in models_folder(home).glob(f"*/{name}")}
    return sorted(folder.replace("--", "/", 1) for folder in folders if not folder.startswith("."))

"""The folder where attn keeps models, training jobs and their records."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_data_path


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$ATTN_HOME`, or the user's data folder (`~/.local/share/attn` on Linux). The folder may not exist yet."""
    chosen = environ.get("ATTN_HOME")
    return Path(chosen).expanduser() if chosen else user_data_path("attn", appauthor=False)


def models_folder(home: Path) -> Path:
    """The folder that holds one folder for each model, named after the model."""
    return home / "models"


def model_folder_name(name: str) -> str:
    """The name of a model's folder; a hub model OWNER/REPO has the folder OWNER--REPO."""
    return name.replace("/", "--", 1)


def model_names(home: Path, configs: Sequence[str] = ("config.json",)) -> list[str]:
    """The names of all models on this machine, sorted: the folders that contain one of the files `configs`."""
    folders = {path.parent.name for name in configs for path in models_folder(home).glob(f"*/{name}")}
    return sorted(folder.replace("--", "/", 1) for folder in folders if not folder.startswith("."))

"""The folder where attn keeps models, training jobs and their records."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from platformdirs import user_data_path

PRIVATE = 0o700
"""The mode of the home folder: it holds the models, jobs and records of all tenants."""


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$ATTN_HOME`, or the user's data folder (`~/.local/share/attn` on Linux). The folder may not exist yet."""
    chosen = environ.get("ATTN_HOME")
    return Path(chosen).expanduser() if chosen else user_data_path("attn", appauthor=False)


def private_folder(folder: Path) -> Path:
    """The folder, made if it is missing; only its owner may enter it, whatever is in it."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    with suppress(OSError):  # a folder of somebody else keeps its mode
        if stat.S_IMODE(folder.stat().st_mode) & ~PRIVATE:
            folder.chmod(PRIVATE)
    return folder


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

"""Where fetched models and texts are kept."""

from __future__ import annotations

from pathlib import Path

from attn_core.home import home_folder, models_folder

attn_home = home_folder


def model_folder(name: str, home: Path) -> Path:
    """Where the converted model `name` lies under `home`."""
    return models_folder(home) / name


def text_file(name: str, home: Path) -> Path:
    """Where the text `name` lies under `home`."""
    return home / "texts" / f"{name}.txt"

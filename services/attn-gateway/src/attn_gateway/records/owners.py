"""Who may use a file: the owners of everything in the home folder, however a path to it is spelled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_gateway.records.models import ModelRecords

SHARED = "shared"
"""The folder below `data` that all tenants use."""


class Owners:
    """Decides what a tenant may use of the files on this machine. Reads the records of models; thread-safe.

    What a path leads to is found by the identity of folders (device and number), so that links, `..`, mounts and, where
    the disk ignores it, case make no difference. In the home folder,

    - `models/NAME` belongs to the owner in the record of that model, and to all tenants without a record,
    - `data/TENANT` belongs to that tenant; files directly in `data`, and `data/shared`, belong to all,
    - all else is for admins: checkpoints, records, caches, and whatever does not exist.

    The folders `private`, such as an artefact store's, are for admins too. Files elsewhere have no owner.
    """

    def __init__(self, home: Path, records: ModelRecords, private: Sequence[Path] = ()) -> None:
        self._models, self._data = home / "models", home / "data"
        self._private = (home, *private)
        self._records = records

    def may_use(self, path: Path, tenant: str | None) -> bool:
        """Whether a tenant may use the file or folder at `path`, and all that links in it lead to; None is an admin."""
        return tenant is None or all(self._belongs(real, tenant) for real in reached(path))

    def _belongs(self, real: Path, tenant: str) -> bool:
        chain = [real, *real.parents]
        identities = [_identity(folder) for folder in chain]
        for store, belongs in ((self._models, self._model_belongs), (self._data, self._data_belongs)):
            root = _identity(store)
            if root is not None and root in identities:
                depth = identities.index(root)
                entry = _entry(chain[depth], chain[depth - 1]) if depth else None
                return entry is not None and belongs(entry, tenant)
        return not any(
            _identity(folder) in identities or identities[0] in map(_identity, _ancestors(folder))
            for folder in (*self._private, self._models, self._data)
            if folder.exists()
        )

    def _model_belongs(self, entry: Path, tenant: str) -> bool:
        if entry.name.startswith("."):
            return False  # a folder that is being written
        record = self._records.find(entry.name)
        return record is None or record.belongs_to(tenant)

    def _data_belongs(self, entry: Path, tenant: str) -> bool:
        return entry.name in {SHARED, tenant} or not entry.is_dir()


def reached(path: Path) -> Iterator[Path]:
    """The real path of a file or folder, then those of all that links in the folder lead to, each once."""
    waiting, seen = [path], set[Path]()
    while waiting:
        real = Path(os.path.realpath(waiting.pop()))
        if real in seen:
            continue
        seen.add(real)
        yield real
        for folder, folders, files in os.walk(real):
            waiting.extend(link for name in (*folders, *files) if (link := Path(folder, name)).is_symlink())


def _ancestors(folder: Path) -> Sequence[Path]:
    return Path(os.path.realpath(folder)).parents


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and number of a file or folder; None if it cannot be found."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _entry(folder: Path, given: Path) -> Path | None:
    """The entry of a folder that is the given file, with the name that it has there; None if there is none."""
    wanted = _identity(given)
    if wanted is None:
        return None
    entries = list(folder.iterdir())
    return given if given in entries else next((entry for entry in entries if _identity(entry) == wanted), None)

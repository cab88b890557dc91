"""Finds the folder of a model that a tenant may use, on this machine or in the artefact store."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName
from attn_engine.host import find_folder
from attn_engine.host.loading import CONFIGS, path_of
from attn_gateway.records import ArtifactStore, ModelRecords, Owners
from attn_models.lora.files import is_adapter
from attn_models.weights.manifest import file_sha256
from attn_schema.home import model_folder_name, model_names, models_folder

WAITING = ThreadPoolExecutor(32, thread_name_prefix="attn-sources")
"""Threads for artefact stores, which may block for minutes when these fail.

asyncio's own few threads stay free for tokenisation.
"""


class ModelSources:
    """Finds folders of models by path or name, also by downloads.

    Without `records`, every model is available to all tenants.
    """

    def __init__(self, home: Path, records: ModelRecords | None = None, artifacts: ArtifactStore | None = None) -> None:
        self._home = home
        self._records = records
        self._artifacts = artifacts

    @staticmethod
    async def fingerprint(folder: Path) -> str:
        """What `fingerprint_of` returns, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(WAITING, fingerprint_of, folder)

    async def find(self, source: str, tenant: str | None = None) -> Path:
        """The folder for a name that this tenant may use, or for an absolute path; tenant None is an admin.

        Raises `UnknownName` with similar names among those that it may use, `InvalidValue` for a path if the caller is
        not an admin, `Unavailable` for records that cannot be read, and the errors of fetching from the artefact store.
        """
        if tenant is not None and path_of(source).is_absolute():
            raise InvalidValue.of("source", source, "the name of a model; paths are for admins")
        if self._records is None:
            found = await asyncio.get_running_loop().run_in_executor(WAITING, self._found, source, tenant)
        else:
            found = await self._records.database.read(self._found, source, tenant)
        if isinstance(found, Path) or self._artifacts is None:
            return Path(found)
        return await asyncio.get_running_loop().run_in_executor(WAITING, self._artifacts.fetch, found)

    def _found(self, source: str, tenant: str | None) -> Path | str:
        """The folder on this machine, or else the artefact that holds it."""
        try:
            return find_folder(source, self._home, self._hidden(tenant))
        except UnknownName:
            record = self._records.find(source) if self._records else None
            if record is None or not record.belongs_to(tenant) or not record.artifact or self._artifacts is None:
                raise
        return record.artifact

    def _hidden(self, tenant: str | None) -> set[str]:
        """The names of the models of this machine that a tenant may not use."""
        if tenant is None or self._records is None:
            return set()
        owners, models = Owners(self._home, self._records), models_folder(self._home)
        names = model_names(self._home, CONFIGS)
        return {name for name in names if not owners.may_use(models / model_folder_name(name), tenant)}


def fingerprint_of(folder: Path) -> str:
    """A text that changes with the files of a model folder; empty if the folder is gone.

    Of an adapter's files it is the content that counts. Those of a model may be large: their sizes and times count.
    """
    contents = is_adapter(folder)
    digest = hashlib.sha256()
    files = sorted(path for path in folder.glob("*") if path.is_file())
    for path in files:
        found = path.stat()
        digest.update(f"{path.name}\0{found.st_size}\0".encode())
        digest.update((file_sha256(path) if contents else str(found.st_mtime_ns)).encode())
    return digest.hexdigest() if files else ""

"""Finds the folder of a model that a tenant may use, on this machine or in the artefact store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName
from attn_host import find_folder
from attn_host.loading import path_of
from attn_storage import ArtifactStore, ModelRecord, ModelRecords

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

    async def find(self, source: str, tenant: str | None = None) -> Path:
        """The folder for a name that this tenant may use, or for an absolute path; tenant None is an admin.

        Raises `UnknownName` with similar names among those that it may use, `InvalidValue` for a path if the caller is
        not an admin, `Unavailable` for records that cannot be read, and the errors of fetching from the artefact store.
        """
        if tenant is not None and path_of(source).is_absolute():
            raise InvalidValue.of("source", source, "the name of a model; paths are for admins")
        known = await self._records.database.read(self._records.all) if self._records else ()
        return await asyncio.get_running_loop().run_in_executor(WAITING, self._folder, source, tenant, known)

    def _folder(self, source: str, tenant: str | None, known: Sequence[ModelRecord]) -> Path:
        records = {record.name: record for record in known}
        hidden = {name for name, record in records.items() if not record.belongs_to(tenant)}
        try:
            return find_folder(source, self._home, hidden)
        except UnknownName:
            record = records.get(source)
            if record is None or source in hidden or not record.artifact or self._artifacts is None:
                raise
        return self._artifacts.fetch(record.artifact)

"""Finds the folder of a model that a tenant may use, on this machine or in the artefact store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from attn_core.errors import CheckpointInvalid, InvalidValue, OutOfCapacity, Unavailable, UnknownName, UserError
from attn_gateway.records import ArtifactStore, ModelRecords, Owners
from attn_models.lora.peft_config import ADAPTER_CONFIG_NAME, is_adapter
from attn_models.weights.manifest import fingerprint
from attn_schema import DeploymentConfig, EngineConfig
from attn_schema.engine import KV_CACHE_BYTES
from attn_schema.home import model_folder_name, model_names, models_folder

from attn_serve.gguf_conversion import folder_of_gguf

Result = TypeVar("Result")

CONFIGS = ("config.json", ADAPTER_CONFIG_NAME)
"""The files of which a folder of a model, or of an adapter, has one."""
WAITING = ThreadPoolExecutor(32, thread_name_prefix="attn-sources")
"""Threads for artefact stores, which may block for minutes when these fail.

asyncio's own few threads stay free for tokenisation.
"""

WEIGHTS = ("*.safetensors", "*.gguf")


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
        """The fingerprint of a folder's files, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(WAITING, fingerprint, folder)

    async def find(self, source: str, tenant: str | None = None) -> Path:
        """The folder for a name that this tenant may use, or for an absolute path; tenant None is an admin.

        Raises `UnknownName` with similar names among those that it may use, `InvalidValue` for a path if the caller is
        not an admin, `Unavailable` for records that cannot be read, and the errors of fetching from the artefact store.
        """
        loop = asyncio.get_running_loop()
        if path_of(source).is_absolute():
            if tenant is not None:
                raise InvalidValue.of("source", source, "the name of a model; paths are for admins")
            # No record names a path, and the conversion of a GGUF file takes longer than a database may.
            return await loop.run_in_executor(WAITING, find_folder, source, self._home)
        found = await self._read(self._found, source, tenant)
        if isinstance(found, Path) or self._artifacts is None:
            return Path(found)
        return await loop.run_in_executor(WAITING, self._artifacts.fetch, found)

    async def names(self, tenant: str | None = None) -> list[str]:
        """The names in the home for which `find` returns a folder, sorted; raises `Unavailable` like it."""
        return await self._read(lambda: sorted({*model_names(self._home, CONFIGS)} - self._hidden(tenant)))

    async def _read(self, look: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that reads the home and the records, without blocking the event loop."""
        if self._records is None:
            return await asyncio.get_running_loop().run_in_executor(WAITING, look, *arguments)
        return await self._records.database.read(look, *arguments)

    async def current(self, source: str, tenant: str | None = None) -> str:
        """The fingerprint of the files that `find` would return now; empty if it finds none."""
        try:
            return await self.fingerprint(await self.find(source, tenant))
        except (UserError, Unavailable):
            return ""

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


def weight_files(folder: Path) -> list[Path]:
    """The weight files in a model's folder; of a GGUF file that file."""
    return [folder] if folder.is_file() else [path for pattern in WEIGHTS for path in folder.glob(pattern)]


def engines_bytes(folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> int:
    """The memory for the weights and KV caches of all engines of a model, or for the weights of an adapter.

    A KV cache whose size is not given counts with the default of a CPU.
    """
    weights = sum(path.stat().st_size for path in weight_files(folder))
    if is_adapter(folder):
        return weights
    cache = KV_CACHE_BYTES if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    return (weights + cache + config.kv_offload_bytes) * deployment.together.at_first


def require_memory(wanted: int, taken: int, most: float | None) -> None:
    """Raise `OutOfCapacity` if `wanted` bytes more than the `taken` ones exceed `most`; None is no limit."""
    if most is not None and taken + wanted > most:
        text = f"{wanted} bytes for weights and KV caches, besides {taken} of other models of this tenant"
        text = f"{text}, exceed its limit max_memory_bytes={most:g}"
        raise OutOfCapacity(text, limit="max_memory_bytes", allowed=f"{most:g}")


def find_folder(source: str, home: Path, hidden: Collection[str] = ()) -> Path:
    """The folder of a model or an adapter, given an absolute path or a name under the home's models.

    For the path of a GGUF file it is the folder into which it is converted below the home; one with an adapter is read
    as it is. Names in `hidden` are treated as unknown.

    Raises `UnknownName`, which suggests similar names, `CheckpointInvalid` for a path that is not a model folder, and
    for a file what `folder_of_gguf` raises.
    """
    given = path_of(source)
    if given.is_absolute():
        if os.path.isfile(given):  # noqa: PTH113
            if is_adapter(given):
                return given
            return folder_of_gguf(given, home)
        # Unlike `Path.is_file`, this does not raise for paths that are too long or not permitted.
        if not any(os.path.isfile(given / name) for name in CONFIGS):  # noqa: PTH113
            raise CheckpointInvalid.of(given, "is not a model folder: it has no config.json")
        return given
    known = sorted(set(model_names(home, CONFIGS)).difference(hidden))
    if source not in known:
        raise UnknownName.of("model", source, known)
    return models_folder(home) / model_folder_name(source)


def path_of(source: str) -> Path:
    """The source as a path with `~` expanded; unexpanded if there is no such home folder."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)

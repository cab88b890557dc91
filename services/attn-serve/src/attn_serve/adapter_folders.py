"""The adapters that are loaded on a model, for its engines that start later: these must load the same files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from attn_core.errors import WrongState
from attn_models.weights.manifest import fingerprint

log = logging.getLogger(__name__)


class AdapterFolders:
    """The folders of loaded adapters by name, with the fingerprints of the files that were loaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Path, str]] = {}
        self._changed: set[str] = set()

    async def add(self, name: str, folder: Path) -> None:
        """Remember an adapter that has been loaded."""
        self._loaded[name] = folder, await asyncio.to_thread(fingerprint, folder)
        self._changed.discard(name)

    def remove(self, name: str) -> None:
        """Forget an adapter that has been unloaded."""
        self._loaded.pop(name, None)

    def require_unchanged(self, name: str) -> None:
        """Raise `WrongState` for an adapter that an engine could not load, as its files had changed."""
        if name in self._changed and name in self._loaded:
            text = f"the files of adapter {name!r} have changed since it was loaded; unload it and load it again"
            raise WrongState(text, adapter=name)

    async def load_into(self, load: Callable[[str, Path], Awaitable[object]]) -> None:
        """Load all adapters by `load` in an engine that has just started, except those whose files have changed."""
        for name, folder in (await self.unchanged()).items():
            await load(name, folder)

    async def unchanged(self) -> dict[str, Path]:
        """The folders by adapter, without those whose files have changed; tasks of these are refused from now on."""
        found = {}
        for name, (folder, known) in list(self._loaded.items()):
            if await asyncio.to_thread(fingerprint, folder) == known:
                found[name] = folder
            else:
                log.warning("adapter %s is not loaded in a new engine, as its files have changed", name)
                self._changed.add(name)
        return found

"""Hearing that records have changed, from whichever process."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

POLL_SECONDS = 0.05


class Changes:
    """Counts changes of the job store. One cheap look at the file serves all watchers."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._changed = asyncio.Condition()
        self.count = 0
        self.closed = False

    async def follow(self) -> None:
        """Look for changes until cancelled."""
        seen = self._version()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            version = self._version()
            if version != seen:
                seen = version
                await self.wake()

    async def wake(self) -> None:
        """Let everybody look."""
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def beyond(self, count: int, seconds: float) -> bool:
        """Wait until `self.count` is above `count`; False if it is not within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.count > count)
        return self.count > count

    async def close(self) -> None:
        """Let everybody see that nothing more will be heard."""
        self.closed = True
        await self.wake()
        self._connection.close()

    def _version(self) -> int:
        # SQLite's own counter of commits by other connections; reading it takes microseconds.
        version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return version

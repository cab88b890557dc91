"""The temporary folder of a private Ray cluster, which the next server removes if its owner could not."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from attn_core.errors import Unavailable
from attn_schema.locks import exclusive

PREFIX = "attn-ray-"
LOCK = "owner.lock"


class RayFolder:
    """A new folder in the system's temporary folder, with a path short enough for Ray's sockets.

    Its owner holds a file lock in it, which the operating system releases when the owner dies, even by SIGKILL.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = ExitStack()
        unlocked = self.path / "unlocked"
        self._lock.enter_context(exclusive(unlocked))
        # The lock file gets its final name when it is locked, so that it is never unlocked while its owner lives.
        unlocked.rename(self.path / LOCK)

    def remove(self) -> None:
        """Delete the folder with everything that Ray wrote; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned() -> None:
    """Delete the folders of this user whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # The folder may be gone meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == getattr(os, "getuid", lambda: 0)():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    # A folder without its lock file is just being created.
    if (path / LOCK).is_file():
        with contextlib.suppress(Unavailable), exclusive(path / LOCK):
            shutil.rmtree(path, ignore_errors=True)

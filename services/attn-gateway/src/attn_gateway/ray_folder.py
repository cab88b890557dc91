"""The temporary folder of a private Ray, which the next server removes if its owner could not."""

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
    """A new folder below the system's temporary one, short enough for the paths of Ray's sockets.

    Its owner holds a lock in it that the operating system frees when the owner dies, by SIGKILL too.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = ExitStack()
        unlocked = self.path / "unlocked"
        self._lock.enter_context(exclusive(unlocked))
        # Under its name it is never seen unlocked while its owner lives.
        unlocked.rename(self.path / LOCK)

    def remove(self) -> None:
        """Delete it with all that Ray wrote; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned() -> None:
    """Delete the folders of this user whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    # Without its lock a folder is just being made.
    if (path / LOCK).is_file():
        with contextlib.suppress(Unavailable), exclusive(path / LOCK):
            shutil.rmtree(path, ignore_errors=True)

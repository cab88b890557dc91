"""The temporary folder of a private Ray, which the next server removes if its owner could not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "attn-ray-"
LOCK = "owner.lock"


class RayFolder:
    """A new folder below the system's temporary one, short enough for the paths of Ray's sockets.

    Its owner holds a lock in it that the kernel frees when the owner dies, by SIGKILL too.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        unlocked = self.path / "unlocked"
        self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Under its name it is never seen unlocked while its owner lives.
        unlocked.rename(self.path / LOCK)

    def remove(self) -> None:
        """Delete it with all that Ray wrote; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def remove_abandoned() -> None:
    """Delete the folders of this user whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Gone meanwhile, or another user's.
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    # Without its lock a folder is just being made: opening does not create it.
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)

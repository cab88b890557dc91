"""Putting a finished folder in the place of another in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import uuid
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def sync_path(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap_in(stage: Path, target: Path) -> None:
    """Rename the folder `stage` to `target`, in the same directory; a folder already there is removed.

    Where the kernel can exchange two names (Linux), `target` exists at every instant.
    Raises OSError with the old folder in place.
    """
    if not target.exists():
        stage.rename(target)
        sync_path(target.parent)
        return
    old = stage if exchange(stage, target) else replace_in_two_steps(stage, target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def replace_in_two_steps(stage: Path, target: Path) -> Path:
    """Move `target` aside and `stage` into its place; where the old folder is now.

    Raises OSError with the old folder back in its place.
    """
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
    target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing names atomically; False, with nothing done, where the system cannot.

    Raises OSError when the system can but refuses these names.
    """
    if not sys.platform.startswith("linux"):
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    result = function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))

"""Writes checkpoint folders atomically: a folder exists completely or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointWriteFailed, InvalidValue, cleaning_up
from safetensors import SafetensorError

from attn_models.weights.manifest import MANIFEST_NAME, write_manifest

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def sync_path(path: Path) -> None:
    """Flush a file or directory to the disk, where the system can: Windows flushes no folders."""
    if os.name == "nt":
        return
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
    """Move `target` aside and `stage` into its place; returns the new path of the old folder.

    Raises OSError with the old folder back in its place.
    """
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
    target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        with cleaning_up("the old folder"):
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


@contextmanager
def staged_folder(target: Path, source: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """An empty folder beside `target` to fill; on exit it is flushed, sealed and renamed to `target`.

    The order is: files, their flush, the manifest (with `source`), its flush, the rename. After any failure inside, or
    a kill at any point, `target` is what it was before. Leftovers of killed writers on this host are removed first.

    Raises InvalidValue for a target that `require_replaceable` refuses, CheckpointWriteFailed when the file system
    fails, a full disk included.
    """
    require_replaceable(target)
    stage = target.parent / f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        stage.mkdir()
        yield stage
        _seal(stage, source)
        swap_in(stage, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteFailed.of(target, error) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A path beside `target` to write a file to; on exit it is flushed and renamed to `target`.

    After any failure inside `target` is what it was before. Raises InvalidValue for a target that is a folder,
    CheckpointWriteFailed when the file system fails.
    """
    if target.is_dir():
        raise InvalidValue.of("target", str(target), "a new file, or one to replace; this is a folder")
    stage = target.with_name(f"{_prefix(target)}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield stage
        sync_path(stage)
        stage.replace(target)
        sync_path(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteFailed.of(target, error) from error
    finally:
        stage.unlink(missing_ok=True)


def require_replaceable(target: Path) -> None:
    """Raise `InvalidValue` if `target` holds anything but a checkpoint with a manifest: it would be lost."""
    if not target.exists() or (target / MANIFEST_NAME).is_file():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    kind = "a folder with other files" if target.is_dir() else "a file"
    allowed = f"a new folder, an empty one, or a model folder that attn wrote; this is {kind}, which is left as it is"
    raise InvalidValue.of("target", str(target), allowed)


def remove_leftovers(target: Path) -> None:
    """Remove unfinished folders for `target` whose writer, a process on this host, no longer runs."""
    prefix = f"{_prefix(target)}{socket.gethostname()}-"
    for path in target.parent.glob(f"{_prefix(target)}*"):
        pid = path.name.removeprefix(prefix).split("-")[0]
        if path.name.startswith(prefix) and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _alive(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 is Ctrl-C: what a dead process has left is kept
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _seal(stage: Path, source: Mapping[str, Any] | None) -> None:
    for path in stage.iterdir():
        path.chmod(0o644)
        sync_path(path)
    sync_path(write_manifest(stage, source))
    sync_path(stage)

"""The file of a SQLite database: made whole or not at all, so that an empty one is known to have lost its records."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from attn_core.errors import WrongState

REMEDY = "restore it from a backup, or move it away to begin without records"
LOGS = ("-wal", "-journal")
"""The ends of the names of files with which SQLite completes a database."""


def damaged(path: object, reason: str) -> WrongState:
    """The error for a database that must not be used as it is."""
    return WrongState(f"the database {path} is damaged: {reason}; {REMEDY}", database=path)


def opened(path: Path, timeout: float = 1.0) -> sqlite3.Connection:
    """A connection to a file that exists; raises `WrongState` for an empty one, which SQLite takes for a new one."""
    if path.exists() and path.stat().st_size == 0:
        raise damaged(path, "the file is empty")
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    return sqlite3.connect(address, uri=True, timeout=timeout, check_same_thread=False)


def identity(path: Path) -> tuple[int, int] | None:
    """A value that changes when the file is replaced or emptied; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size else None


def require_or_create(path: Path, create: Callable[[Path], list[str]]) -> list[str]:
    """Make the database with `create` if there is none; raises `WrongState` for a file without tables.

    `create` makes the tables in a file of another name, which gets its name once it is complete. So a file without
    tables was not just made by another process: its content is lost. Returns what `create` does, else an empty list.
    """
    logs = [log for end in LOGS if (log := path.with_name(path.name + end)).exists()]
    if path.exists():
        _require_tables(path)
        return []
    if logs:
        raise damaged(path, f"the file is missing, but {logs[0].name} has a part of its content")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".new-{uuid.uuid4().hex}-{path.name}")
    try:
        made.touch(mode=0o600)  # SQLite gives the logs beside a database the mode of the database
        with closing(sqlite3.connect(made)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # so that the file is no longer empty
        done = create(made)
        try:
            os.link(made, path)
        except FileExistsError:
            _require_tables(path)  # another process was faster
            return []
        return done
    finally:
        made.unlink(missing_ok=True)


def _require_tables(path: Path) -> None:
    """Raise `WrongState` unless the file has tables; other faults show themselves when it is used."""
    connection = opened(path)
    try:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        return
    finally:
        connection.close()
    if tables == (0,):
        raise damaged(path, "the file has no tables")

"""The database that several processes share: SQLite on one machine, PostgreSQL on many, through SQLAlchemy Core."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from attn_core.errors import InvalidValue, MissingPackage, Unavailable
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from attn_storage import schema_version

DATABASE = "ATTN_DATABASE"
"""The environment variable with the URL of the database."""
ALLOWED = "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
BUSY_SECONDS = 30.0
"""How long a transaction waits for its turn, or for a database that cannot be reached, before it gives up."""
CONNECT_SECONDS = 5
RETRY_SECONDS = 0.25
CONNECTIONS = 8
"""The number of connections that a process keeps to PostgreSQL; it opens at most twice as many."""


def database_url(home: Path, environ: Mapping[str, str] = os.environ) -> str:
    """`ATTN_DATABASE`, or the SQLite file `records.sqlite3` of the home folder."""
    return environ.get(DATABASE) or f"sqlite:///{home / 'records.sqlite3'}"


class Database:
    """Connections to the database at `url`; safe to share between threads.

    An empty database gets its tables. Raises `InvalidValue` for an unsupported URL, `WrongState` for another schema
    version (see `schema_version`), `Unavailable` if the database cannot be reached.
    """

    def __init__(self, url: str, *, upgrade: bool = False) -> None:
        self.url = _parsed(url)
        self.upgraded: list[str] = []
        self._sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _engine(self.url)
        self._watch: Connection | None = None
        self._watching = threading.Lock()
        try:
            with self._transaction("BEGIN IMMEDIATE", patience=0.0) as connection:
                schema_version.lock(connection)
                if upgrade:
                    self.upgraded = schema_version.upgrade(connection)
                schema_version.require(connection)
        except BaseException:
            self._engine.dispose()
            raise

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A write transaction, which is rolled back on an error. Raises `Unavailable` if the database cannot be used.

        SQLite has one writer at a time; with PostgreSQL, read the rows that the write depends on `with_for_update`.
        """
        with self._transaction("BEGIN IMMEDIATE", patience=BUSY_SECONDS) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read transaction."""
        with self._transaction("BEGIN", patience=BUSY_SECONDS) as connection:
            yield connection

    def version(self) -> object:
        """A value that changes when any process, this one included, has written; to be polled by one thread."""
        with self._watching:
            return self._version()

    def _version(self) -> object:
        try:
            if self._watch is None:
                self._watch = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            query = "PRAGMA data_version" if self._sqlite else "SELECT pg_current_wal_insert_lsn()::text"
            return self._watch.exec_driver_sql(query).scalar()
        except DBAPIError as error:
            if self._watch is not None:
                self._watch.invalidate()
                self._watch.close()
            self._watch = None
            raise self._unavailable(error) from None

    def close(self) -> None:
        """Close all connections; to be called once no thread polls `version` any more."""
        # SQLite crashes if one thread closes a connection while another uses it.
        with self._watching:
            if self._watch is not None:
                self._watch.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self, begin: str, patience: float) -> Iterator[Connection]:
        with self._connect(patience) as connection:
            connection.execution_options(attn_begin=begin)
            try:
                with connection.begin():
                    yield connection
            except DBAPIError as error:
                if _is_gone(error):
                    # The next connection opens whichever file exists then.
                    connection.invalidate()
                if error.connection_invalidated or _is_busy(error):
                    raise self._unavailable(error) from error
                raise
            except BaseException:
                if self._sqlite:
                    # While the error is held, so are the rows that were not read, and with them SQLite's old snapshot:
                    # in the pool, this connection could never write again.
                    connection.invalidate()
                raise

    def _connect(self, patience: float) -> Connection:
        """Open a connection, waiting for at most `patience` seconds for a database that cannot be reached."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._engine.connect()
            except (DBAPIError, PoolTimeout) as error:
                if time.monotonic() >= deadline:
                    raise self._unavailable(error) from None
                time.sleep(RETRY_SECONDS)

    def _unavailable(self, error: Exception) -> Unavailable:
        reason = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        return Unavailable(f"the database {self.shown} cannot be used: {reason}", database=self.shown)


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        raise InvalidValue.of(DATABASE, "not a URL", ALLOWED) from None
    if url.drivername not in {"sqlite", "postgresql+psycopg"} or not url.database or url.database == ":memory:":
        raise InvalidValue.of(DATABASE, url.render_as_string(hide_password=True), ALLOWED)
    return url


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        Path(url.database or "").parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False}, pool_size=4)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(
            url,
            connect_args={"connect_timeout": CONNECT_SECONDS},
            pool_size=CONNECTIONS,
            max_overflow=CONNECTIONS,
            # After a restart of the server, a new connection is made instead of raising an error.
            pool_pre_ping=True,
        )
    except (ImportError, NoSuchModuleError) as error:
        raise MissingPackage.of("attn-storage[postgresql]", f"the database {url.drivername}") from error


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself.
    connection.isolation_level = None
    # With WAL, readers never wait; NORMAL loses no commits when a process dies, only when the machine does.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql(options.get("attn_begin", "BEGIN"))


def _is_busy(error: DBAPIError) -> bool:
    """Whether SQLite waited in vain for another writer, or its file cannot be opened or written."""
    message = str(error.orig)
    return _is_gone(error) or any(word in message for word in ("locked", "unable to open", "disk I/O", "disk is full"))


def _is_gone(error: DBAPIError) -> bool:
    """Whether SQLite's file was removed or replaced since it was opened."""
    return any(word in str(error.orig) for word in ("readonly", "no such table"))

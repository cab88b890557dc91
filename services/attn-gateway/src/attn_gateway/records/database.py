"""The database that several processes share: SQLite on one machine, PostgreSQL on many, through SQLAlchemy Core."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from attn_core.errors import AttnError, InvalidValue, MissingPackage, Unavailable, cleaning_up
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from attn_gateway.records import schema_version, sqlite_file
from attn_gateway.standstills import answer

SQLITE_AWAY = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip
SQLITE_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
POSTGRESQL_AWAY = ("08", "53", "57", "25006", "42P01")
"""Beginnings of SQLSTATE: connection lost, no resources, stopping or starting, read-only, and no tables."""
DATABASE = "ATTN_DATABASE"
"""The environment variable with the URL of the database."""
ALLOWED = "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
BUSY_SECONDS = 30.0
"""How long a transaction waits for its turn, or for a database that cannot be reached, before it gives up."""
CALL_SECONDS = 1.0
"""The same for the reading transactions, and all connections, of a server that answers calls."""
ANSWER_SECONDS = 2.0
"""How long `Database.read` waits for a database that does not answer."""
CONNECTING: dict[str, Any] = {
    "connect_timeout": 5, "tcp_user_timeout": 15_000, "keepalives_idle": 10, "keepalives_interval": 5,
    "keepalives_count": 3,
}  # fmt: skip
"""How soon PostgreSQL's driver notices that the machine of the server is away; the system's defaults are minutes."""
RETRY_SECONDS = 0.25
CONNECTIONS = 8
"""The number of connections that a process keeps to PostgreSQL; it opens at most twice as many."""
T = TypeVar("T")


def database_url(home: Path, environ: Mapping[str, str] = os.environ) -> str:
    """`ATTN_DATABASE`, or the SQLite file `records.sqlite3` of the home folder."""
    return environ.get(DATABASE) or f"sqlite:///{home / 'records.sqlite3'}"


class Database:
    """Connections to the database at `url`; safe to share between threads.

    A new database gets its tables. Raises `InvalidValue` for an unsupported URL, `WrongState` for another schema
    version (see `schema_version`) and for a damaged file, also an empty one, `Unavailable` if the database cannot be
    reached. Transactions wait for a database that cannot be reached for `patience` seconds: a server that answers calls
    wants `CALL_SECONDS`, a job that records its results more.
    """

    def __init__(self, url: str, *, upgrade: bool = False, patience: float = BUSY_SECONDS) -> None:
        self.url = _parsed(url)
        self.upgraded: list[str] = []
        self._sqlite = self.url.get_backend_name() == "sqlite"
        if self._sqlite:
            self.upgraded = sqlite_file.require_or_create(Path(self.url.database or ""), _create_tables)
        self._patience = patience
        self._engine = _engine(self.url, patience)
        # Calls that wait for a database must not take the few threads in which asyncio does everything else.
        self._threads = ThreadPoolExecutor(2 * CONNECTIONS, thread_name_prefix="attn-database")
        self._closed = False
        self._watch: Connection | None = None
        self._watching = threading.Lock()
        try:
            with self._transaction("BEGIN IMMEDIATE", patience=0.0, turn=BUSY_SECONDS) as connection:
                schema_version.lock(connection)
                if upgrade:
                    self.upgraded += schema_version.upgrade(connection)
                schema_version.require(connection)
        except BaseException:
            with cleaning_up("the connections"):
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
        with self._transaction("BEGIN IMMEDIATE", self._patience, turn=BUSY_SECONDS) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read transaction; raises as `writing`."""
        with self._transaction("BEGIN", self._patience, turn=self._patience) as connection:
            yield connection

    async def read(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The result of a function that only reads this database, called in a thread of the database's own.

        Raises its errors, and `Unavailable` after `ANSWER_SECONDS`: a connection may hang.
        """
        return await self._in_time(ANSWER_SECONDS, partial(function, *arguments, **named))

    async def write(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The same for a function that writes, which waits for its turn for `BUSY_SECONDS`.

        Before that it reads, so that nothing is written if the database is away.
        """
        await self.read(self._probe)
        return await self._in_time(BUSY_SECONDS + ANSWER_SECONDS, partial(function, *arguments, **named))

    def _probe(self) -> None:
        with self.reading() as connection:
            connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()

    async def _in_time(self, seconds: float, function: Callable[[], T]) -> T:
        if self._closed:
            raise self._failed(ConnectionError("it is closed"))
        try:
            return await answer(asyncio.get_running_loop().run_in_executor(self._threads, function), seconds)
        except TimeoutError:
            raise self._failed(TimeoutError(f"it has not answered within {seconds:g} seconds")) from None

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
            raise self._failed(error) from None

    def close(self) -> None:
        """Close all connections; to be called once no thread polls `version` any more."""
        self._closed = True
        # SQLite crashes if one thread closes a connection while another uses it.
        with self._watching:
            if self._watch is not None:
                self._watch.close()
        self._engine.dispose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self, begin: str, patience: float, turn: float) -> Iterator[Connection]:
        with self._connect(patience) as connection:
            connection.execution_options(attn_begin=begin, attn_turn=turn)
            try:
                with connection.begin():
                    yield connection
            except DBAPIError as error:
                if _is_gone(error):
                    # The next connection opens whichever file exists then.
                    connection.invalidate()
                if error.connection_invalidated or _is_away(error) or _is_damaged(error):
                    raise self._failed(error) from error
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
                if time.monotonic() >= deadline or _is_damaged(error):
                    raise self._failed(error) from None
                time.sleep(RETRY_SECONDS)

    def _failed(self, error: Exception) -> AttnError:
        """The error for a database that is away, or for one that is damaged."""
        reason = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        if _is_damaged(error):
            return sqlite_file.damaged(self.shown, reason)
        return Unavailable(f"the database {self.shown} cannot be used: {reason}", database=self.shown)


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError:
        raise InvalidValue.of(DATABASE, "not a URL", ALLOWED) from None
    if url.drivername not in {"sqlite", "postgresql+psycopg"} or not url.database or url.database == ":memory:":
        raise InvalidValue.of(DATABASE, url.render_as_string(hide_password=True), ALLOWED)
    return url


def _create_tables(path: Path) -> list[str]:
    """Make a new SQLite database with all tables; returns the revisions that were applied."""
    engine = _engine(URL.create("sqlite", database=str(path)), BUSY_SECONDS)
    try:
        with engine.begin() as connection:
            return schema_version.upgrade(connection)
    finally:
        engine.dispose()


def _engine(url: URL, patience: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        file = Path(url.database or "")
        creator = partial(sqlite_file.opened, file, BUSY_SECONDS)
        engine = create_engine(url, creator=creator, pool_size=4, pool_timeout=patience)
        event.listen(engine, "connect", partial(_prepare_sqlite, file))
        event.listen(engine, "checkout", partial(_require_same_file, file))
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(
            url,
            connect_args=CONNECTING,
            pool_size=CONNECTIONS,
            max_overflow=CONNECTIONS,
            pool_timeout=patience,
            # After a restart of the server, a new connection is made instead of raising an error.
            pool_pre_ping=True,
        )
    except (ImportError, NoSuchModuleError) as error:
        raise MissingPackage.of("attn-gateway[postgresql]", f"the database {url.drivername}") from error


def _prepare_sqlite(file: Path, connection: Any, record: Any) -> None:
    record.info["file"] = sqlite_file.identity(file)
    # The driver must not begin transactions by itself.
    connection.isolation_level = None
    # With WAL, readers never wait; NORMAL loses no commits when a process dies, only when the machine does.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _require_same_file(file: Path, _connection: object, record: Any, _proxy: object) -> None:
    """Make the pool open another connection if the file is another one now: nobody would see what is written."""
    if record.info["file"] != sqlite_file.identity(file):
        raise DisconnectionError


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(1000 * options.get('attn_turn', BUSY_SECONDS))}")
        connection.exec_driver_sql(options.get("attn_begin", "BEGIN"))


def _is_away(error: DBAPIError) -> bool:
    """Whether the database cannot be used at the moment: SQLite waited in vain for another writer, or its file cannot
    be opened or written; PostgreSQL starts, stops, has no room or no tables."""
    if isinstance(error.orig, sqlite3.Error):
        return _is_gone(error) or _sqlite_code(error) in SQLITE_AWAY
    state = str(getattr(error.orig, "sqlstate", None) or "")
    return state.startswith(POSTGRESQL_AWAY)


def _is_damaged(error: Exception) -> bool:
    """Whether a file of the database has wrong content."""
    state = str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
    return _sqlite_code(error) in SQLITE_DAMAGED or state.startswith("XX")


def _sqlite_code(error: Exception) -> int | None:
    """SQLite's primary error code; None for other errors."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _is_gone(error: DBAPIError) -> bool:
    """Whether SQLite's file was removed or replaced since it was opened."""
    return any(word in str(error.orig) for word in ("readonly", "no such table"))

"""A database that is away, hangs or is damaged: every kind of fault is told soon, as what it is, and never hidden."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attn_core.errors import Unavailable, WrongState
from attn_gateway.records import Database
from attn_gateway.records.database import ANSWER_SECONDS, CALL_SECONDS
from attn_gateway.records.tables import jobs
from sqlalchemy import insert, select

CALLS = 40
"""More than there are threads and connections."""
SOON = ANSWER_SECONDS + 1.5
"""How long refusals may take here, where nothing else should delay them but a busy machine."""


def ids(database: Database) -> list[str]:
    with database.reading() as connection:
        return list(connection.execute(select(jobs.c.id)).scalars())


def add(database: Database, name: str) -> None:
    with database.writing() as connection:
        connection.execute(insert(jobs).values(id=name, config="{}", state="queued", created=1.5))


async def refusals(database: Database) -> set[type[Exception]]:
    """The errors of many calls at once that read or write."""
    calls = [database.read(ids, database) for _ in range(CALLS)]
    calls += [database.write(add, database, f"never-{number}") for number in range(4)]
    began = time.monotonic()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - began < SOON
    assert not [one for one in found if not isinstance(one, Exception)]
    assert not [one for one in found if "\n" in str(one)]
    return {type(one) for one in found}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite3"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Database]:
    with Database(f"sqlite:///{path}", patience=CALL_SECONDS) as database:
        add(database, "a")
        yield database


def spoil(file: Path, damage: str) -> None:
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(b"these are the pages of a book" * 1000 if damage == "overwritten" else b"")


@pytest.mark.parametrize("how", ["hung", "stopped"])
async def test_calls_to_a_postgresql_that_is_away_are_refused_soon_and_served_once_it_is_back(postgres, how) -> None:
    postgres.execute(f"CREATE DATABASE away_{how}")
    with Database(postgres.url.replace("/postgres?", f"/away_{how}?"), patience=CALL_SECONDS) as database:
        add(database, "a")
        if how == "hung":
            with postgres.hung():
                assert await refusals(database) == {Unavailable}
        else:
            postgres.stop()
            try:
                assert await refusals(database) == {Unavailable}
            finally:
                postgres.start()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await database.read(ids, database) == ["a"]
                    break
        await database.write(add, database, "b")


@pytest.mark.parametrize("damage", ["overwritten", "emptied", "removed"])
async def test_calls_to_a_damaged_file_are_refused_soon(file: Path, damage: str) -> None:
    with opened(file) as database:
        database._engine.dispose()  # the last connection moves what was written from the log to the file
        spoil(file, damage)
        assert await refusals(database) <= {Unavailable, WrongState}


async def test_a_file_that_another_process_keeps_to_itself_is_waited_for_a_second(file: Path) -> None:
    with opened(file) as database, contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        database._engine.dispose()
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE jobs SET id = id")
        assert await refusals(database) <= {Unavailable}


@pytest.mark.parametrize("content", ["nothing", "no tables", "log without file"])
def test_records_that_lost_their_content_are_not_taken_for_new_ones(file: Path, content: str) -> None:
    if content == "nothing":
        file.touch()
    elif content == "no tables":
        with contextlib.closing(sqlite3.connect(file)) as made:
            made.execute("PRAGMA journal_mode = WAL")
            made.execute("PRAGMA user_version = 1")
    else:
        file.with_name(f"{file.name}-wal").write_bytes(b"pages")
    before = {path.name for path in file.parent.iterdir()}
    with pytest.raises(WrongState):
        Database(f"sqlite:///{file}")
    assert {path.name for path in file.parent.iterdir()} == before


async def test_a_database_that_is_closed_is_away(file: Path) -> None:
    with opened(file) as database:
        assert await database.read(ids, database) == ["a"]
    with pytest.raises(Unavailable):
        await database.read(ids, database)

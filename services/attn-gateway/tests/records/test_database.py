"""Records survive other writers, restarts and versions of the schema that are not ours."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from attn_core.errors import InvalidValue, Unavailable, WrongState
from attn_gateway.records import Database, database_url, schema_version
from attn_gateway.records.tables import jobs, metadata
from sqlalchemy import event, func, insert, select, text, update


def add(database: Database, name: str) -> None:
    with database.writing() as connection:
        connection.execute(insert(jobs).values(id=name, config="{}", state="queued", created=1.5))


def ids(database: Database) -> list[str]:
    with database.reading() as connection:
        return list(connection.execute(select(jobs.c.id).order_by(jobs.c.number)).scalars())


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_an_error_that_is_held_among_rows_keeps_nobody_from_writing(database, url, kind):
    many = [{"id": f"job {number}", "config": "{}", "state": "queued", "created": 1.5} for number in range(2000)]
    with database.writing() as connection:
        connection.execute(insert(jobs), many)
    with pytest.raises(ValueError, match="invalid literal") as held, getattr(database, kind)() as connection:
        [int(name) for name in connection.execute(select(jobs.c.id)).scalars()]
    with Database(url) as other:
        add(other, "from another process")
    add(database, "from this one")
    assert held.value.__traceback__ is not None, "which holds the rows that were not read"
    assert len(ids(database)) == 2002


def test_what_one_process_writes_another_reads(database, url):
    add(database, "a")
    script = f"""
from attn_gateway.records import Database
from attn_gateway.records.tables import jobs
from sqlalchemy import insert, select
with Database({url!r}) as database, database.writing() as connection:
    assert list(connection.execute(select(jobs.c.id)).scalars()) == ["a"]
    connection.execute(insert(jobs).values(id="b", config="", state="", created=0.0))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert ids(database) == ["a", "b"]


def test_a_transaction_is_written_whole_or_not_at_all(database):
    def write() -> None:
        with database.writing() as connection:
            connection.execute(insert(jobs).values(id="a", config="", state="", created=0.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert ids(database) == []


def test_writers_in_many_threads_lose_no_update(database):
    add(database, "a")

    def write() -> None:
        for _ in range(20):
            with database.writing() as connection:
                step = connection.execute(select(jobs.c.step).where(jobs.c.id == "a").with_for_update()).scalar_one()
                connection.execute(update(jobs).values(step=step + 1))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.reading() as connection:
        assert connection.execute(select(jobs.c.step)).scalar() == 80


def test_large_numbers_and_times_come_back_as_they_were(database):
    add(database, "a")
    with database.writing() as connection:
        connection.execute(update(jobs).values(step=2**40, started=1795416759.123456))
    with database.reading() as connection:
        assert connection.execute(select(jobs.c.step, jobs.c.started)).one() == (2**40, 1795416759.123456)


def test_the_version_changes_with_each_write_and_only_then(database, url):
    before = database.version()
    assert database.version() == before
    add(database, "a")
    assert database.version() != before
    before = database.version()
    with Database(url) as other:
        add(other, "b")
    assert database.version() != before


def test_closing_waits_for_a_thread_that_asks_for_the_version(url):
    database = Database(url)
    database.version()
    query_started, go_on, answers = threading.Event(), threading.Event(), []

    def slow(*_given: object) -> None:
        query_started.set()
        go_on.wait(30)

    event.listen(database._engine, "before_cursor_execute", slow)
    reader = threading.Thread(target=lambda: answers.append(database.version()))
    closer = threading.Thread(target=database.close)
    reader.start()
    assert query_started.wait(30)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    reader.join(30)
    closer.join(30)
    assert len(answers) == 1
    assert not closer.is_alive()


def test_the_migrations_make_just_the_tables_that_are_used(database):
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert schema_version.current(connection) == schema_version.NEWEST


def test_many_who_open_an_empty_database_at_once_make_its_tables_once(url):
    failed = []

    def open_() -> None:
        try:
            Database(url).close()
        except Exception as error:  # noqa: BLE001 - told by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=open_) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with Database(url) as database:
        assert ids(database) == []


@pytest.mark.parametrize(("version", "remedy"), [("0000", "attn_gateway.records upgrade"), ("9999", "newer")])
def test_a_database_of_another_schema_version_is_refused_in_one_line(url, version, remedy):
    with Database(url) as database, database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
    for upgrade, told in ((False, remedy), (True, "")):
        with pytest.raises(WrongState, match=f"schema version {version}.*{told}") as caught:
            Database(url, upgrade=upgrade)
        assert "\n" not in caught.value.message


def test_a_database_with_tables_of_others_is_refused_and_left_alone(url):
    with Database(url) as database, database.writing() as connection:
        metadata.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
        connection.execute(text("CREATE TABLE invoices (id INTEGER)"))
    with pytest.raises(WrongState, match="invoices"):
        Database(url)


@pytest.mark.parametrize(
    "given",
    ["", "no url", "mysql://host/db", "sqlite://", "sqlite:///:memory:", "postgresql://u:secret@host/db", "sqlite"],
)
def test_another_kind_of_url_is_refused_without_its_password(given):
    with pytest.raises(InvalidValue, match="ATTN_DATABASE") as caught:
        Database(given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "given", ["sqlite:////proc/nothing/records.sqlite3", "postgresql+psycopg://u:secret@127.0.0.1:1/db"]
)
def test_a_database_that_cannot_be_reached_is_told_in_one_line_at_once(given):
    began = time.monotonic()
    with pytest.raises((Unavailable, OSError)) as caught:
        Database(given)
    assert time.monotonic() - began < 100, "not after the minutes that a driver waits by itself"
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "records.sqlite3"
    path.write_bytes(b"these are the pages of a book" * 100)
    with pytest.raises(WrongState, match="not a database"):
        Database(f"sqlite:///{path}")


def test_a_postgresql_that_is_restarted_delays_writers_and_fails_none(postgres, tmp_path, request):
    postgres.execute("CREATE DATABASE restarted")
    with Database(postgres.url.replace("/postgres?", "/restarted?")) as database:
        add(database, "before")
        postgres.stop()
        failed: list[Exception] = []

        def write() -> None:
            try:
                add(database, "meanwhile")
            except Exception as error:  # noqa: BLE001 - told by the test's own thread
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive()
        postgres.start()
        thread.join(30)
        assert not failed
        with database.reading() as connection:
            assert connection.execute(select(func.count()).select_from(jobs)).scalar() == 2


def test_the_url_is_that_of_the_environment_or_a_file_at_home(tmp_path):
    assert database_url(tmp_path, {}) == f"sqlite:///{tmp_path}/records.sqlite3"
    assert database_url(tmp_path, {"ATTN_DATABASE": "postgresql+psycopg://h/d"}) == "postgresql+psycopg://h/d"


def test_the_upgrade_command_says_what_it_did(tmp_path):
    command = [sys.executable, "-m", "attn_gateway.records", "upgrade", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert schema_version.NEWEST in first.stdout
    assert "nothing to do" in again.stdout

"""The schema version of a database: creating its tables, refusing another version, and upgrading."""

from __future__ import annotations

import threading
from pathlib import Path

from attn_core.errors import WrongState
from sqlalchemy import Connection, inspect, text

MIGRATIONS = Path(__file__).parent / "migrations"
NEWEST = max(path.stem[1:5] for path in MIGRATIONS.glob("r[0-9]*.py"))
"""The revision that this version of attn reads and writes."""
UPGRADING = threading.Lock()
"""Alembic has one `op` for the whole process."""
UPGRADE = "python -m attn_gateway.records upgrade"
LOCK = 0x6174746E
"""The number of the advisory lock under which PostgreSQL lets one process at a time change the schema."""


def current(connection: Connection) -> str | None:
    """The revision of the database; None for one without tables. Raises `WrongState` if it has only other tables."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        if tables:
            named = ", ".join(sorted(tables)[:5])
            raise WrongState(f"the database contains other tables ({named}); use a separate one for attn", tables=named)
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision


def require(connection: Connection) -> None:
    """Create the tables of an empty database; raises `WrongState` for one of another schema version.

    To be called in a transaction without concurrent writers, see `lock`.
    """
    found = current(connection)
    if found is None:
        upgrade(connection)
    elif found != NEWEST:
        remedy = f"run: {UPGRADE}" if found < NEWEST else "install a newer attn-gateway"
        message = f"the database has schema version {found}, this attn needs {NEWEST}; {remedy}"
        raise WrongState(message, found=found, needed=NEWEST)


def lock(connection: Connection) -> None:
    """Keep other processes from changing the schema until the transaction ends; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": LOCK})


def upgrade(connection: Connection) -> list[str]:
    """Bring the schema to the newest version; returns the revisions that were applied."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    found = current(connection)
    context = MigrationContext.configure(connection)
    script = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    if found is not None and found not in {step.revision for step in script.walk_revisions()}:
        message = f"the database has schema version {found}, from which no migration leads to {NEWEST}"
        raise WrongState(message, found=found, needed=NEWEST)
    steps = list(script.iterate_revisions(NEWEST, found or "base"))[::-1]
    with UPGRADING, Operations.context(context):
        for step in steps:
            step.module.upgrade()
            context.stamp(script, step.revision)
    return [step.revision for step in steps]

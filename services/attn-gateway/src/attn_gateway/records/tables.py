"""The database tables, for SQLite and PostgreSQL. A change here needs a migration."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text

metadata = MetaData()
"""The metadata of all tables."""

LARGE = BigInteger().with_variant(Integer, "sqlite")
"""The type of 64-bit whole numbers."""

jobs = Table(
    "jobs",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False, server_default=""),
    Column("config", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("step", LARGE, nullable=False, server_default="0"),
    Column("metrics", Text, nullable=False, server_default="{}"),
    Column("checkpoint", Text),
    Column("error", Text),
    Column("stop", Text),
    Column("model_path", Text, nullable=False, server_default=""),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("ended", Double),
    Column("last_event", LARGE, nullable=False, server_default="0"),
    Column("priority", Integer, nullable=False, server_default="0"),
    Index("jobs_by_end", "ended"),
    sqlite_autoincrement=True,
)
"""Training jobs; config and metrics are JSON, times seconds since 1970. `owner` is a tenant, "" if shared by all."""

events = Table(
    "events",
    metadata,
    Column("job", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("event", LARGE, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("payload", Text, nullable=False),
)
"""The events of each job, numbered from 1 without gaps."""

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("token", LARGE, nullable=False),
    Column("expires", Double, nullable=False),
)
"""Leases: the holder of each name; a row is kept when its lease ends, so that tokens go on rising."""

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False, server_default=""),
    Column("artifact", Text, nullable=False, server_default=""),
    Column("created", Double, nullable=False),
)
"""Finished models: their owners, and their names in the artefact store, empty for models kept on one machine."""

served_models = Table(
    "served_models",
    metadata,
    Column("place", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("source", Text, nullable=False),
    Column("base", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("serving", Integer, nullable=False),
)
"""The models that calls have loaded, by server, owner and name: how each was loaded, as JSON."""

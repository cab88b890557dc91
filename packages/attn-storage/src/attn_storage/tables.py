"""The tables of the records, for SQLite and PostgreSQL. A change here comes with a migration."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, MetaData, Table, Text

metadata = MetaData()
"""All tables."""

LARGE = BigInteger().with_variant(Integer, "sqlite")
"""Whole numbers of 64 bits."""

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
"""Training jobs; config and metrics as JSON, times since 1970 in seconds. `owner` is a tenant, "" for everybody's."""

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
"""What happened to each job, counted from 1 without gaps."""

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("token", LARGE, nullable=False),
    Column("expires", Double, nullable=False),
)
"""Who may do what only one may do at a time; a row stays when its lease ends, for its token."""

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False, server_default=""),
    Column("artifact", Text, nullable=False, server_default=""),
    Column("created", Double, nullable=False),
)
"""Finished models: whose they are, and under which name in the artefact store, empty for those of one machine."""

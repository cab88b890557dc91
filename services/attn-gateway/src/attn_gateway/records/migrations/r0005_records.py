"""The first version: jobs and their events, leases, models, and how calls loaded the models that are served."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None

LARGE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create all tables."""
    _make_jobs()
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("token", LARGE, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False, server_default=""),
        sa.Column("artifact", sa.Text, nullable=False, server_default=""),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_table(
        "served_models",
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("place", "owner", "name")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("source", "base", "engine", "deployment")),
        sa.Column("serving", sa.Integer, nullable=False),
    )


def _make_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("owner", sa.Text, nullable=False, server_default=""),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, server_default="1"),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("step", LARGE, nullable=False, server_default="0"),
        sa.Column("metrics", sa.Text, nullable=False, server_default="{}"),
        sa.Column("checkpoint", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("stop", sa.Text),
        sa.Column("model_path", sa.Text, nullable=False, server_default=""),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("started", sa.Double),
        sa.Column("ended", sa.Double),
        sa.Column("last_event", LARGE, nullable=False, server_default="0"),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sqlite_autoincrement=True,
    )
    # The server queries the jobs that have not ended every two seconds.
    op.create_index("jobs_by_end", "jobs", ["ended"])
    op.create_table(
        "events",
        sa.Column("job", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("event", LARGE, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
    )

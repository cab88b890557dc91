"""Add the priority of jobs, and an index to find jobs that have not ended.

A job of a higher priority starts before others and takes the place of running ones of a lower priority; the queue reads
the priority with each job that has not ended.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

TABLE = "jobs"
COLUMN = "priority"
INDEX = "jobs_by_end"


def upgrade() -> None:
    """Add the column and the index; existing jobs get the default priority."""
    op.add_column(TABLE, sa.Column(COLUMN, sa.Integer, nullable=False, server_default="0"))
    # The server queries the jobs that have not ended every two seconds.
    op.create_index(INDEX, TABLE, ["ended"])


def downgrade() -> None:
    """Drop the index and the column.

    SQLite drops a column itself from version 3.35 on, which every Python that attn supports has.
    """
    op.drop_index(INDEX, TABLE)
    op.drop_column(TABLE, COLUMN)

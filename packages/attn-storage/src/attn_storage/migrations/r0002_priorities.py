"""Jobs have a priority, and those that have not ended are found by an index.

A job of a higher priority starts before others and takes the room of running ones of a lower one; the queue reads the
priority with each job that has not ended.
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
    """Jobs that were submitted before have the priority of all that ask for none."""
    op.add_column(TABLE, sa.Column(COLUMN, sa.Integer, nullable=False, server_default="0"))
    # The server looks for jobs that have not ended every other second.
    op.create_index(INDEX, TABLE, ["ended"])


def downgrade() -> None:
    """Forget priorities.

    SQLite drops a column itself from version 3.35 on, which every Python that attn supports has.
    """
    op.drop_index(INDEX, TABLE)
    op.drop_column(TABLE, COLUMN)

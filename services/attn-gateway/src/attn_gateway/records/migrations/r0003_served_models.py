"""Add the models that calls have loaded, so that a server loads them again when it is started again.

A model is known by its server's place, its owner and its name; how it was loaded is JSON.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "served_models",
        sa.Column("place", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("deployment", sa.Text, nullable=False),
        sa.Column("traffic", sa.Double, nullable=False),
        sa.Column("serving", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("served_models")

"""Add gateways and the models that they serve, so that gateways on several machines show the same."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

LARGE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
GATEWAY_TEXTS = ("place", "address", "host", "process", "version")
MODEL_KEY = ("place", "owner", "name")
MODEL_TEXTS = ("gateway", "state", "detail", "source", "base", "engine", "deployment", "info")


def upgrade() -> None:
    """Create both tables; gateways of older versions are not recorded in them."""
    op.create_table(
        "gateways",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in GATEWAY_TEXTS),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("heartbeat", sa.Double, nullable=False),
    )
    op.create_table(
        "served_models",
        *(sa.Column(name, sa.Text, primary_key=True) for name in MODEL_KEY),
        *(sa.Column(name, sa.Text, nullable=False) for name in MODEL_TEXTS),
        sa.Column("generation", LARGE, nullable=False),
        sa.Column("traffic", sa.Double, nullable=False),
        sa.Column("configured", sa.Integer, nullable=False),
        sa.Column("changed", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Drop both tables."""
    for name in ("served_models", "gateways"):
        op.drop_table(name)

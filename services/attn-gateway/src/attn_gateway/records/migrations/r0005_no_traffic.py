"""Drop the traffic shares of models: a model has one name, and no versions."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Drop the column; a model whose name is NAME@VERSION is then listed as failed until it is unloaded."""
    op.drop_column("served_models", "traffic")

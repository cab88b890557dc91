"""Keep of served models how calls loaded them, by which a server loads them again; gateways no longer follow others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KEY = ("place", "owner", "name")
TEXTS = ("source", "base", "engine", "deployment")


def upgrade() -> None:
    """Carry over the models that calls have loaded; those of options are loaded by their options."""
    op.rename_table("served_models", "served_models_before")
    op.create_table(
        "served_models",
        *(sa.Column(name, sa.Text, primary_key=True) for name in KEY),
        *(sa.Column(name, sa.Text, nullable=False) for name in TEXTS),
        sa.Column("traffic", sa.Double, nullable=False),
        sa.Column("serving", sa.Integer, nullable=False),
    )
    kept = ", ".join((*KEY, *TEXTS, "traffic"))
    op.execute(
        f"INSERT INTO served_models ({kept}, serving) "  # noqa: S608 -- names of columns, written above
        f"SELECT {kept}, 1 FROM served_models_before WHERE configured = 0 AND state = 'serving'"
    )
    for name in ("served_models_before", "gateways"):
        op.drop_table(name)

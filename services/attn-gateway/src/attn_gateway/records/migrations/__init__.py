"""Alembic migrations from one schema version to the next: `rNNNN_what.py` has the revision NNNN."""

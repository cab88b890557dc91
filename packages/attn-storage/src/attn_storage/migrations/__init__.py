"""Steps from one schema version to the next, by Alembic: `rNNNN_what.py`, whose revision is NNNN."""

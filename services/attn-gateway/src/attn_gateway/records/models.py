"""Records of finished models: their owners, and where servers on other machines find their files."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attn_core.errors import AlreadyExists
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from attn_gateway.records.database import Database
from attn_gateway.records.tables import models


@dataclass(frozen=True)
class ModelRecord:
    """A model of a training job. `owner` is a tenant, empty if all share it; `artifact` is its name in the store."""

    name: str
    owner: str
    artifact: str = ""

    def belongs_to(self, tenant: str | None) -> bool:
        """Whether this tenant may use the model; None is an admin."""
        return tenant is None or self.owner in {"", tenant}


class ModelRecords:
    """The records of finished models. A model folder without a record belongs to all tenants."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def record(self, model: ModelRecord) -> None:
        """Add or update the record of a model; raises `AlreadyExists` if its name belongs to another owner."""
        values = {"owner": model.owner, "artifact": model.artifact}
        try:
            with self.database.writing() as connection:
                found = connection.execute(select(models.c.owner).where(models.c.name == model.name)).scalar()
                if found is None:
                    connection.execute(insert(models).values(values | {"name": model.name, "created": time.time()}))
                elif found == model.owner:
                    connection.execute(update(models).where(models.c.name == model.name).values(values))
                else:
                    raise AlreadyExists(f"the name {model.name!r} cannot be used; choose another", name=model.name)
        except IntegrityError:
            raise AlreadyExists(f"the name {model.name!r} has just been taken", name=model.name) from None

    def forget(self, name: str) -> None:
        """Delete the record of a model that no longer exists; its name can be used again."""
        with self.database.writing() as connection:
            connection.execute(delete(models).where(models.c.name == name))

    def find(self, name: str) -> ModelRecord | None:
        """The record of a model; None if it has none."""
        with self.database.reading() as connection:
            row = connection.execute(select(models).where(models.c.name == name)).mappings().first()
        return None if row is None else ModelRecord(row["name"], row["owner"], row["artifact"])

    def all(self) -> list[ModelRecord]:
        """All records, sorted by name."""
        with self.database.reading() as connection:
            rows = connection.execute(select(models).order_by(models.c.name)).mappings()
            return [ModelRecord(row["name"], row["owner"], row["artifact"]) for row in rows]

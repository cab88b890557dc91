"""Records of the models that calls have loaded on a server, by which its successor loads them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, and_, delete, insert, select

from attn_gateway.records.database import Database
from attn_gateway.records.tables import served_models


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """How a model was loaded; `engine` and `deployment` are JSON that only the server interprets.

    `place` stands for the server and its successors. `owner` is a tenant, empty if all share the model; `base` is the
    model that an adapter changes. `serving` is false while the model is being loaded.
    """

    place: str
    owner: str
    name: str
    source: str
    base: str = ""
    engine: str = "{}"
    deployment: str = "{}"
    serving: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Owner and name."""
        return self.owner, self.name


class LoadedModels:
    """The records of loaded models. Every method is one transaction, and may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def at(self, place: str) -> list[LoadedModel]:
        """The records of a place, sorted by name and owner."""
        columns = served_models.c
        query = select(served_models).where(columns.place == place).order_by(columns.name, columns.owner)
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [LoadedModel(**{**row, "serving": bool(row["serving"])}) for row in rows]

    def put(self, model: LoadedModel) -> None:
        """Record a model in place of any of its place, owner and name."""
        with self.database.writing() as connection:
            connection.execute(delete(served_models).where(_is(model)))
            connection.execute(insert(served_models).values(asdict(model) | {"serving": int(model.serving)}))

    def remove(self, model: LoadedModel) -> None:
        """Delete the record of a model, if there is one."""
        with self.database.writing() as connection:
            connection.execute(delete(served_models).where(_is(model)))


def _is(model: LoadedModel) -> ColumnElement[bool]:
    columns = served_models.c
    return and_(columns.place == model.place, columns.owner == model.owner, columns.name == model.name)

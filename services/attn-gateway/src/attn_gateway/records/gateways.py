"""Records of gateways and of the models that they serve, which all gateways of a database share.

A gateway writes its heartbeat every few seconds. A gateway that stops without `leave` counts as gone once its process
is known to have ended, on this machine at once, or else after `GONE_SECONDS`. Gateways of one `place` share the engines
of their models, as those on one Ray cluster do; a gateway with engines of its own is a place by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, RowMapping, and_, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from attn_gateway.records.database import Database
from attn_gateway.records.leases import database_time, is_gone
from attn_gateway.records.tables import gateways, served_models

GONE_SECONDS = 30.0
"""A gateway without a heartbeat for this long is gone."""
HEARTBEAT_SECONDS = GONE_SECONDS / 6
FORGOTTEN_SECONDS = 24 * 3600.0
"""How long the records of gateways that are gone, and of models that ended, are kept."""


class ServedState(StrEnum):
    """The lifecycle state of a served model; UNLOADED tells the other gateways of its place to drop it."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    UNLOADED = "unloaded"

    @property
    def ended(self) -> bool:
        """Whether the model has ended, so that its name is free."""
        return self in (ServedState.FAILED, ServedState.UNLOADED)


@dataclass(frozen=True, kw_only=True)
class GatewayRecord:
    """A gateway. `process` is a name from `leases.this_process`; times are in seconds since 1970."""

    id: str
    place: str
    address: str
    host: str
    process: str
    version: str
    started: float = 0.0
    heartbeat: float = 0.0
    gone: bool = False

    @property
    def can_be_succeeded(self) -> bool:
        """Whether a later gateway can have this place, which the id of a gateway in its name rules out."""
        return self.id not in self.place


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that the gateways of a place serve; `engine`, `deployment` and `info` are JSON that only they interpret.

    `owner` is a tenant, empty if all share the model; `base` is the model that an adapter changes. `configured` says
    that the model was named by an option or a config file of a gateway, not by a call.
    """

    place: str
    owner: str
    name: str
    gateway: str
    state: ServedState
    source: str
    detail: str = ""
    base: str = ""
    engine: str = "{}"
    deployment: str = "{}"
    traffic: float = 0.0
    configured: bool = False
    info: str = "{}"
    generation: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Owner and name."""
        return self.owner, self.name

    def visible_to(self, tenant: str | None) -> bool:
        """Whether this tenant may see the model; None is an admin."""
        return tenant is None or self.owner in {"", tenant}


@dataclass(frozen=True)
class World:
    """A snapshot of the records: gateways by id, and models."""

    gateways: Mapping[str, GatewayRecord]
    models: tuple[ServedModel, ...]

    def is_gone(self, gateway: str) -> bool:
        """Whether a gateway has ended, regularly or not."""
        found = self.gateways.get(gateway)
        return found is None or found.gone


class GatewayRecords:
    """The records of gateways and served models. Every method is one transaction, and may be called from any thread.

    Times are by the clock of the database, so that the clocks of machines need not agree.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def join(self, gateway: GatewayRecord, *, shared: bool = True) -> None:
        """Record a new gateway, and delete the records of gateways that have been gone for long.

        If engines are not `shared`, it replaces earlier gateways of its place, whose records are deleted, too.
        """
        with self.database.writing() as connection:
            now = database_time(connection)
            self._forget(connection, now - FORGOTTEN_SECONDS)
            if not shared:
                connection.execute(delete(gateways).where(gateways.c.place == gateway.place))
            connection.execute(insert(gateways).values(_row(gateway) | {"started": now, "heartbeat": now}))

    def beat(self, gateway: GatewayRecord) -> None:
        """Record a heartbeat of a gateway; if its record was lost, it is added again."""
        with self.database.writing() as connection:
            now = database_time(connection)
            mine = gateways.c.id == gateway.id
            if not connection.execute(update(gateways).where(mine).values(heartbeat=now)).rowcount:
                connection.execute(insert(gateways).values(_row(gateway) | {"started": now, "heartbeat": now}))

    def leave(self, gateway: GatewayRecord, *, shared: bool) -> None:
        """Remove a gateway that ends regularly, and the records of models that nobody will serve again.

        Models that calls loaded are kept: the other gateways of a shared place serve them, and the next gateway of its
        own place loads them again. Those that options and config files named are kept as long as another gateway of a
        shared place runs.
        """
        with self.database.writing() as connection:
            connection.execute(delete(gateways).where(gateways.c.id == gateway.id))
            here = served_models.c.place == gateway.place
            now = database_time(connection)
            rows = connection.execute(select(gateways).where(gateways.c.place == gateway.place)).mappings()
            if not shared:
                kept = (served_models.c.configured == 0) & (served_models.c.state == ServedState.SERVING)
                lost = here & ~kept if gateway.can_be_succeeded else here
                connection.execute(delete(served_models).where(lost))
            elif all(_gateway(row, now).gone for row in rows):
                connection.execute(delete(served_models).where(here & (served_models.c.configured == 1)))

    def world(self) -> World:
        """A snapshot of all gateways and of all served models, sorted by name and owner."""
        with self.database.reading() as connection:
            now = database_time(connection)
            found = [_gateway(row, now) for row in connection.execute(select(gateways)).mappings()]
            order = (served_models.c.name, served_models.c.owner, served_models.c.place)
            rows = connection.execute(select(served_models).order_by(*order)).mappings()
            return World({one.id: one for one in found}, tuple(_model(row) for row in rows))

    def claim(self, wanted: ServedModel, *, shared: bool) -> tuple[ServedModel, bool]:
        """Claim the model's name in its place, to load it: the new record and True, or the one that has it and False.

        A name is free if no model has it, if its model ended, or if its gateway is gone before the model was loaded; if
        engines are not `shared`, also after that, because they ended with the gateway. A tenant cannot claim a name of
        a model that all tenants share.
        """
        try:
            return self._claimed(wanted, shared=shared)
        except IntegrityError:
            # Another gateway inserted the record at the same time.
            return self._claimed(wanted, shared=shared)

    def _claimed(self, wanted: ServedModel, *, shared: bool) -> tuple[ServedModel, bool]:
        with self.database.writing() as connection:
            return self._claim(connection, wanted, shared=shared)

    def _claim(self, connection: Connection, wanted: ServedModel, *, shared: bool) -> tuple[ServedModel, bool]:
        now = database_time(connection)
        found = None
        for owner in dict.fromkeys((wanted.owner, "")):
            one = self._find(connection, wanted.place, owner, wanted.name)
            if one is not None and not self._is_free(connection, one, now, shared=shared):
                return one, False
            found = one if owner == wanted.owner else found
        mine = replace(wanted, generation=1 if found is None else found.generation + 1)
        values = _row(mine) | {"changed": now}
        if found is None:
            connection.execute(insert(served_models).values(values))
        else:
            connection.execute(update(served_models).where(_is(found)).values(values))
        return mine, True

    def write(self, changes: Iterable[tuple[ServedModel, Mapping[str, Any]]]) -> list[ServedModel]:
        """Change fields of models in one transaction; returns the changed records.

        A model whose name has been loaded again since is left as it is, and not returned.
        """
        written = []
        with self.database.writing() as connection:
            now = database_time(connection)
            for model, values in changes:
                if connection.execute(update(served_models).where(_is(model)).values(**values, changed=now)).rowcount:
                    written.append(replace(model, **values))
        return written

    def remove(self, models: Iterable[ServedModel]) -> None:
        """Delete the records of models, unless their names have been loaded again since."""
        with self.database.writing() as connection:
            for model in models:
                connection.execute(delete(served_models).where(_is(model)))

    def restore(self, model: ServedModel) -> None:
        """Record a model again after the contents of the database were lost."""
        with self.database.writing() as connection:
            if self._find(connection, model.place, model.owner, model.name) is None:
                values = _row(model) | {"changed": database_time(connection)}
                connection.execute(insert(served_models).values(values))

    def _find(self, connection: Connection, place: str, owner: str, name: str) -> ServedModel | None:
        columns = served_models.c
        here = and_(columns.place == place, columns.owner == owner, columns.name == name)
        row = connection.execute(select(served_models).where(here).with_for_update()).mappings().first()
        return None if row is None else _model(row)

    def _is_free(self, connection: Connection, model: ServedModel, now: float, *, shared: bool) -> bool:
        if model.state.ended:
            return True
        row = connection.execute(select(gateways).where(gateways.c.id == model.gateway)).mappings().first()
        gone = row is None or _gateway(row, now).gone
        return gone and (not shared or model.state is ServedState.LOADING)

    def _forget(self, connection: Connection, before: float) -> None:
        kept = select(gateways.c.place)
        connection.execute(delete(gateways).where(gateways.c.heartbeat < before))
        ended = served_models.c.state == ServedState.UNLOADED
        old = ended | served_models.c.place.not_in(kept)
        connection.execute(delete(served_models).where((served_models.c.changed < before) & old))


def _is(model: ServedModel) -> Any:
    columns = served_models.c
    same = and_(columns.place == model.place, columns.owner == model.owner, columns.name == model.name)
    return same & (columns.generation == model.generation)


def _row(record: GatewayRecord | ServedModel) -> dict[str, Any]:
    values = asdict(record)
    values.pop("gone", None)
    if "configured" in values:
        values["configured"] = int(values["configured"])
    return values


def _gateway(row: RowMapping, now: float) -> GatewayRecord:
    gone = row["heartbeat"] < now - GONE_SECONDS or is_gone(row["process"])
    return GatewayRecord(**row, gone=gone)


def _model(row: RowMapping) -> ServedModel:
    values = {name: value for name, value in row.items() if name != "changed"}
    return ServedModel(**values | {"state": ServedState(row["state"]), "configured": bool(row["configured"])})

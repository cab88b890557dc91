"""A finished model belongs to one tenant or to all."""

from __future__ import annotations

import importlib

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from attn_core.errors import AlreadyExists, WrongState
from attn_gateway.records import Database, LoadedModels, ModelRecord, ModelRecords
from attn_gateway.records.tables import served_models
from sqlalchemy import MetaData, Table, insert, text


def test_a_recorded_model_is_found_by_every_server_with_its_owner(database, url):
    records = ModelRecords(database)
    records.record(ModelRecord("hers", "ann"))
    records.record(ModelRecord("everybodys", ""))
    records.record(ModelRecord("hers", "ann", artifact="hers"))
    with Database(url) as other:
        assert ModelRecords(other).all() == [ModelRecord("everybodys", ""), ModelRecord("hers", "ann", "hers")]
    assert records.find("nobodys") is None


def test_a_name_cannot_be_taken_from_its_owner(database):
    records = ModelRecords(database)
    records.record(ModelRecord("m", "ann"))
    with pytest.raises(AlreadyExists) as caught:
        records.record(ModelRecord("m", "bob"))
    assert "ann" not in caught.value.message.split()
    assert records.find("m").owner == "ann"


@pytest.mark.parametrize(("owner", "tenant", "may"), [("", "ann", True), ("ann", "ann", True), ("ann", "bob", False),
                                                      ("ann", "", False), ("ann", None, True)])  # fmt: skip
def test_a_model_is_used_by_its_owner_and_admins(owner, tenant, may):
    assert ModelRecord("m", owner).belongs_to(tenant) is may


def test_records_of_the_version_before_are_refused_and_an_upgrade_keeps_the_models_that_calls_loaded(url):
    before = importlib.import_module("attn_gateway.records.migrations.r0003_served_models")
    columns = (*before.MODEL_KEY, *before.MODEL_TEXTS, "generation", "traffic", "configured", "changed")
    rows = [
        dict.fromkeys(columns, 0) | {"place": "p", "owner": "", "name": name, "state": state, "configured": given}
        | dict.fromkeys(("gateway", "detail", "source", "base", "engine", "deployment", "info"), name)
        for name, state, given in [("called", "serving", 0), ("given", "serving", 1), ("ended", "unloaded", 0)]
    ]  # fmt: skip
    with Database(url) as opened, opened.writing() as connection:
        served_models.drop(connection)
        with Operations.context(MigrationContext.configure(connection)):
            before.upgrade()
        connection.execute(insert(Table("served_models", MetaData(), autoload_with=connection)), rows)
        connection.execute(text("UPDATE alembic_version SET version_num = '0003'"))
    with pytest.raises(WrongState):
        Database(url)
    with Database(url, upgrade=True) as opened:
        assert [(found.name, found.source, found.serving) for found in LoadedModels(opened).at("p")] == [
            ("called", "called", True)
        ]

"""A finished model belongs to one tenant or to all."""

from __future__ import annotations

import pytest
from attn_core.errors import AlreadyExists
from attn_gateway.records import Database, ModelRecord, ModelRecords


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

"""Gateways see one another and what they serve; a name is loaded once, and taken over from one that died."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache

import pytest
from attn_gateway.records import Database, GatewayRecord, GatewayRecords, ServedModel, ServedState, schema_version
from attn_gateway.records.gateways import FORGOTTEN_SECONDS, GONE_SECONDS, HEARTBEAT_SECONDS
from attn_gateway.records.leases import this_process
from attn_gateway.records.tables import gateways, served_models
from sqlalchemy import inspect, text, update


def gateway(name: str, place: str = "ray/one", process: str = "") -> GatewayRecord:
    process = process or this_process()
    return GatewayRecord(id=name, place=place, address=f"{name}:50051", host="here", process=process, version="0.1.0")


def model(by: str, name: str = "m", place: str = "ray/one", **fields) -> ServedModel:
    values = {"owner": "", "state": ServedState.LOADING, "source": "tiny"} | fields
    return ServedModel(place=place, name=name, gateway=by, **values)


@cache
def ended_process() -> str:
    """The name of a process of this machine that has ended."""
    code = "from attn_gateway.records.leases import this_process; print(this_process())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def make_older(database: Database, table, column, seconds: float) -> None:
    with database.writing() as connection:
        connection.execute(update(table).values({column: column - seconds}))


def test_what_one_gateway_records_another_reads(database, url):
    GatewayRecords(database).join(gateway("a"))
    mine, first = GatewayRecords(database).claim(model("a", owner="ann", engine='{"dtype":"float32"}'), shared=True)
    assert first
    with Database(url) as other:
        world = GatewayRecords(other).world()
    assert world.models == (mine,)
    assert world.gateways["a"].address == "a:50051"
    assert not world.is_gone("a")
    assert world.is_gone("nobody")
    assert [mine.visible_to(tenant) for tenant in ("ann", "bob", None)] == [True, False, True]


def test_of_many_who_load_a_name_at_once_one_does(database, url):
    records = GatewayRecords(database)
    names = [f"g{number}" for number in range(6)]
    for name in names:
        records.join(gateway(name))
    found = []
    start = threading.Barrier(len(names))

    def claim(name: str) -> None:
        with Database(url) as own:
            start.wait()
            found.append(GatewayRecords(own).claim(model(name), shared=True))

    threads = [threading.Thread(target=claim, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(first for _, first in found) == [False] * 5 + [True]
    assert len({record.gateway for record, _ in found}) == 1


@pytest.mark.parametrize(
    ("state", "shared", "free"),
    [
        (ServedState.LOADING, True, True),
        (ServedState.SERVING, True, False),
        (ServedState.SERVING, False, True),
        (ServedState.DRAINING, True, False),
    ],
)
def test_a_name_of_a_gateway_that_died_is_taken_over_where_its_engine_is_not_there(database, state, shared, free):
    records = GatewayRecords(database)
    records.join(gateway("dead", process=ended_process()))
    records.join(gateway("b"))
    old, _ = records.claim(model("dead"), shared=shared)
    (old,) = records.write([(old, {"state": state})])
    found, mine = records.claim(model("b"), shared=shared)
    assert mine is free
    assert found.gateway == ("b" if free else "dead")
    assert records.world().gateways["dead"].gone
    # The dead one may only be slow: what it writes later changes nothing.
    assert (records.write([(old, {"state": ServedState.SERVING})]) == []) is free


@pytest.mark.parametrize("state", [ServedState.FAILED, ServedState.UNLOADED])
def test_a_name_whose_model_ended_is_free(database, state):
    records = GatewayRecords(database)
    records.join(gateway("a"))
    old, _ = records.claim(model("a"), shared=True)
    records.write([(old, {"state": state})])
    found, mine = records.claim(model("b", source="other"), shared=True)
    assert mine
    assert (found.generation, found.source) == (2, "other")


def test_a_gateway_of_another_machine_is_gone_once_its_heartbeat_is_old(database):
    records = GatewayRecords(database)
    records.join(gateway("far", process="elsewhere/1/0.00/x"))
    make_older(database, gateways, gateways.c.heartbeat, GONE_SECONDS - HEARTBEAT_SECONDS)
    assert not records.world().is_gone("far")
    make_older(database, gateways, gateways.c.heartbeat, 2 * HEARTBEAT_SECONDS)
    assert records.world().is_gone("far")
    records.beat(gateway("far", process="elsewhere/1/0.00/x"))
    assert not records.world().is_gone("far")


def test_everybodys_name_is_not_a_tenants_own_and_places_do_not_share_names(database):
    records = GatewayRecords(database)
    records.join(gateway("a"))
    everybodys, _ = records.claim(model("a"), shared=True)
    assert records.claim(model("a", owner="ann"), shared=True) == (everybodys, False)
    assert records.claim(model("a", name="other", owner="ann"), shared=True)[1]
    assert records.claim(model("a", name="other", owner="bob"), shared=True)[1]
    assert records.claim(model("a", place="ray/two"), shared=True)[1]


def test_who_leaves_takes_along_what_runs_in_its_own_engines_only(database):
    records = GatewayRecords(database)
    for name in ("a", "b"):
        records.join(gateway(name))
    records.join(gateway("own", place="own"))
    for name, by, place, configured in (("called", "a", "ray/one", False), ("named", "a", "ray/one", True),
                                        ("mine", "own", "own", False)):  # fmt: skip
        records.claim(model(by, name, place, configured=configured), shared=place != "own")

    def names() -> list[str]:
        return [one.name for one in records.world().models]

    records.leave(gateway("own", place="own"), shared=False)
    records.leave(gateway("a"), shared=True)
    assert names() == ["called", "named"]
    records.leave(gateway("b"), shared=True)
    assert names() == ["called"]
    assert records.world().gateways == {}


def test_what_was_lost_is_recorded_again_and_what_is_old_forgotten(database):
    records = GatewayRecords(database)
    records.join(gateway("a"))
    mine, _ = records.claim(model("a"), shared=True)
    records.remove([mine])
    records.beat(replace(gateway("a"), id="again"))
    for _ in range(2):
        records.restore(mine)
    assert records.world().models == (mine,)
    ended, _ = records.claim(model("a", "ended", state=ServedState.UNLOADED), shared=True)
    assert ended in records.world().models
    make_older(database, served_models, served_models.c.changed, 2 * FORGOTTEN_SECONDS)
    records.join(gateway("b"))
    assert records.world().models == (mine,)
    make_older(database, gateways, gateways.c.heartbeat, 2 * FORGOTTEN_SECONDS)
    records.join(gateway("c", place="elsewhere"))
    assert (records.world().models, list(records.world().gateways)) == ((), ["c"])


def test_records_of_the_version_before_are_refused_until_they_are_upgraded(url):
    with Database(url) as opened, opened.writing() as connection:
        for table in (served_models, gateways):
            table.drop(connection)
        connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
    with pytest.raises(Exception, match=r"0002, this attn needs .*run: python -m attn_gateway.records upgrade"):
        Database(url)
    with Database(url, upgrade=True) as opened, opened.reading() as connection:
        assert opened.upgraded[0] == "0003"
        assert {"gateways", "served_models"} <= set(inspect(connection).get_table_names())
        assert schema_version.current(connection) == schema_version.NEWEST


def test_the_show_command_says_which_gateways_run(tmp_path):
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        GatewayRecords(database).join(gateway("a"))
        GatewayRecords(database).join(gateway("b", process=ended_process()))
    command = [sys.executable, "-m", "attn_gateway.records", "show", str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "gateway a:50051 on here: runs" in output
    assert "gateway b:50051 on here: gone" in output

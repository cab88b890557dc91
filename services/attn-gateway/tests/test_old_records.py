"""A server does not start on records of another schema version; the command that it names is about the same home."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from attn_core.errors import WrongState
from attn_gateway.cluster import Cluster, ClusterSettings
from attn_gateway.records.__main__ import main
from attn_gateway.records.database import Database, database_url
from attn_gateway.serve import offered_services


def test_old_records_are_refused_and_the_command_opens_those_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTN_DATABASE", raising=False)
    monkeypatch.setenv("ATTN_HOME", str(tmp_path))
    Database(database_url(tmp_path)).close()
    with sqlite3.connect(tmp_path / "records.sqlite3") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0003'")
    with pytest.raises(WrongState):
        offered_services(Cluster(ClusterSettings(home=tmp_path)))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["show"]) == 1
    assert not list(elsewhere.iterdir())

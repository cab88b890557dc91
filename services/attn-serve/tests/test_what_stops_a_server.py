"""What a server cannot begin with is told in one line, before Ray or any engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy
from attn_core.errors import AttnError, InvalidValue, Unavailable, UnknownName, WrongState
from attn_gateway import Cluster, ClusterSettings, ModelToLoad
from attn_gateway.records import Database
from attn_serve.service import InferenceGrpc


class Recorded(Cluster):
    """A cluster that says whether it was started."""

    started = False

    async def start(self) -> None:
        self.started = True
        await super().start()


async def begin(home: Path, *models: str) -> tuple[AttnError, Recorded]:
    """The error of a server that begins there, and its cluster."""
    cluster = Recorded(ClusterSettings(cpus=1, home=home, models=tuple(ModelToLoad.parse(text) for text in models)))
    with pytest.raises(AttnError) as told:
        await InferenceGrpc(cluster).start()
    assert "\n" not in told.value.message
    return told.value, cluster


async def test_a_database_of_another_schema_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'records.sqlite3'}"
    Database(url).close()
    with sqlalchemy.create_engine(url).begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
    monkeypatch.setenv("ATTN_DATABASE", url)
    error, cluster = await begin(tmp_path)
    assert isinstance(error, WrongState)
    assert "9999" in error.message
    assert not cluster.started


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("ATTN_DATABASE", "mysql://host/records", InvalidValue),
        ("ATTN_DATABASE", "postgresql+psycopg://nobody@127.0.0.1:9/records", Unavailable),
        ("ATTN_ARTIFACTS", "ftp://host/models", InvalidValue),
        ("ATTN_ARTIFACTS", "s3://bucket/models", Unavailable),
    ],
)
async def test_records_or_artefacts_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, kind: type[AttnError]
) -> None:
    if "postgresql" in value:
        pytest.importorskip("psycopg")
    for name, given in (
        ("AWS_ENDPOINT", "http://127.0.0.1:9"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "k"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_REGION", "us-east-1"),
        (variable, value),
    ):
        monkeypatch.setenv(name, given)
    error, cluster = await begin(tmp_path)
    assert isinstance(error, kind)
    assert not cluster.started


async def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_ARTIFACTS", raising=False)
    error, cluster = await begin(tmp_path, "nowhere")
    assert isinstance(error, UnknownName)
    assert not cluster.started

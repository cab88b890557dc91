"""A database of each kind, empty for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from attn_gateway.records import Database

# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))

from postgres_server import PostgresServer, postgres_server, programs, why_not

NUMBERS = count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with postgres_server(programs()) as server:
        yield server


def new_url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of an empty database."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'records.sqlite3'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name}")
    return server.url.replace("/postgres?", f"/{name}?")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_url(request.param, tmp_path, request)


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with Database(url) as opened:
        yield opened

"""A database of each kind, empty for each test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
NUMBERS = count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A running PostgreSQL server, by the helper of attn-storage's own tests."""
    path = ROOT / "packages/attn-storage/tests/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    reason = helper.why_not()
    if reason is not None:
        pytest.skip(reason)
    with helper.postgres_server(helper.programs()) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.sqlite3'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name}")
    return str(server.url).replace("/postgres?", f"/{name}?")

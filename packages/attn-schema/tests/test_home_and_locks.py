"""The folder of models, and locks between processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from attn_core.errors import Unavailable
from attn_schema.home import home_folder, models_folder
from attn_schema.locks import exclusive


def test_the_home_is_where_the_environment_says(tmp_path: Path) -> None:
    assert home_folder({"ATTN_HOME": str(tmp_path)}) == tmp_path
    assert models_folder(tmp_path) == tmp_path / "models"


def test_the_home_is_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert home_folder({}) == Path.home() / ".local/share/attn"


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with exclusive(path), pytest.raises(Unavailable, match="held by another"), exclusive(path):
        pass
    with exclusive(path):
        pass


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path, held, free = tmp_path / "lock", threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(path):
            held.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    threading.Timer(0.2, free.set).start()
    with exclusive(path, wait=60):
        assert free.is_set()
    thread.join()

"""What clients have sent is answered as when they sent it: with the same status, and in the format that they read."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from served import served

RECORDED: list[Any] = json.loads((Path(__file__).parent / "recorded.json").read_text("utf-8"))
HELD = ("previous_response_id", "thread")
"""Fields that name an answer of the recorded run."""


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with served(tmp_path) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        yield client


async def test_what_clients_have_sent_is_answered_as_then(http: httpx2.AsyncClient) -> None:
    wrong = []
    for row in RECORDED:
        if any(isinstance(row.get("body", {}).get(name), str) or "previous" in str(row.get("body", {}).get(name))
               for name in HELD):  # fmt: skip
            continue  # what the clients' own tries cover
        content = json.dumps(row["body"]).encode() if "body" in row else b""
        answer = await http.request(row["method"], row["path"], headers=row["headers"], content=content)
        if answer.status_code != row["status"]:
            wrong.append((row["client"], row["feature"], answer.status_code, answer.text[:300]))
        elif answer.status_code == 200 and row.get("body", {}).get("stream"):
            kind = answer.headers["content-type"]
            assert kind.startswith(("text/event-stream", "application/x-ndjson")), row
    assert not wrong


def test_the_recorded_clients_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text("utf-8")
    clients = {row["client"] for row in RECORDED}
    assert len(clients) >= 20
    assert not [client for client in clients if f"| {client} |" not in page]
    assert all(row["status"] < 500 for row in RECORDED)

"""Runs clients against the real server, and records what they send and whether they work.

    python tests/clients/run.py clients=PYTHON clients-agents=PYTHON ... node=FOLDER

PYTHON is an interpreter that has the clients of a group, FOLDER one with node_modules; `nox -s clients` makes them.
Writes recorded.json, which test_recorded.py sends again, and docs/clients.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recorder import Recorder
from served import served

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
CLIENTS = {
    "dev": ["openai"],
    "clients": [
        "anthropic", "ollama", "litellm", "instructor", "dspy", "langchain", "langchain-anthropic", "langchain-ollama",
        "llama-index", "openai-agents", "pydantic-ai", "smolagents",
    ],
    "clients-agents": ["autogen", "agno", "haystack", "semantic-kernel", "strands"],
    "clients-crewai": ["crewai"],
    "clients-measures": ["guidellm", "lm-eval"],
    "clients-proxy": ["litellm (proxy)"],
    "node": ["openai (node)", "ai, openai-compatible", "ai, openai", "ai, anthropic", "ollama (node)"],
}  # fmt: skip
"""The clients by the environment that has them: those of one need versions that others do not take."""
LONGEST = 40
"""How many characters a text may have that is recorded; those of tries.py have fewer."""
QUIET = {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "CREWAI_DISABLE_TELEMETRY": "true"}
QUIET |= {"OTEL_SDK_DISABLED": "true", "PYTHONPATH": ""}
HEAD = """# Clients

What clients do with this server when only its URL is given to them. The model says what a script says, so that a
feature works if the client returns exactly that; "agent" is a task of two tool calls. `nox -s clients` runs them and
writes this page; what they have sent is sent again in every run of the tests (`tests/clients`).

| client | version | works | does not, and why |
|---|---|---|---|
"""


def tried(command: list[str], folder: Path, recorder: Recorder) -> tuple[list[Any], list[Any]]:
    """The features that a client was asked for, and the requests that it sent, with the feature of each."""
    environment = os.environ | QUIET | {"HOME": tempfile.mkdtemp()}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    rows, sent = [], []
    recorder.requests.clear()
    for line in process.stdout or ():
        if line.startswith('{"client"'):
            row = json.loads(line)
            rows.append(row)
            sent += [{"client": row["client"], "feature": row["feature"], **each} for each in recorder.requests]
            recorder.requests.clear()
            print(row["client"], row["version"], row["feature"], row["why"] or "works", flush=True)
    if process.wait() or not rows:
        raise SystemExit(f"{command} failed")
    return rows, sent


def without_texts(value: Any) -> Any:
    """A value of a request without the texts of a framework's authors: their shape is what is recorded."""
    if isinstance(value, dict):
        said = {name: "a text" for name, each in value.items() if name == "description" and isinstance(each, str)}
        return {name: without_texts(each) for name, each in value.items()} | said
    if isinstance(value, list):
        return [without_texts(each) for each in value]
    return "a text" if isinstance(value, str) and len(value) > LONGEST and not value.startswith("{") else value


def plain(sent: list[Any]) -> list[Any]:
    """Requests with ids in place of those that change with each run, each once, and without long texts."""
    ids: dict[str, str] = {}
    text = json.dumps(without_texts(sent), ensure_ascii=False)
    for found in re.findall(r"(?:call|msg|resp|fc|rs|chatcmpl)[_-][0-9a-f]{9,32}", text):
        ids.setdefault(found, f"{re.split('[_-]', found)[0]}_{len(ids):09}")
    for found, name in ids.items():
        text = text.replace(found, name)
    kept: dict[str, Any] = {}
    for row in json.loads(text):
        kept.setdefault(json.dumps([row["path"], row["status"], row.get("body")], sort_keys=True), row)
    return list(kept.values())


def page(rows: list[Any]) -> str:
    """The table of clients."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        found.setdefault((row["client"], f"{row['package']} {row['version']}"), []).append(row)
    lines = []
    for (client, version), features in found.items():
        works = ", ".join(row["feature"] for row in features if not row["why"])
        fails = "; ".join(f"{row['feature']}: {row['why']}" for row in features if row["why"])
        lines.append(f"| {client} | {version} | {works} | {fails.replace('|', ' ')} |\n")
    return HEAD + "".join(lines)


async def main(groups: list[str]) -> None:
    """Run all clients of all interpreters."""
    rows, sent = list[Any](), list[Any]()
    with tempfile.TemporaryDirectory() as home:
        async with served(Path(home)) as url:
            recorder = Recorder(url)
            for name, clients in CLIENTS.items():
                where = {"dev": sys.executable, **dict(group.split("=", 1) for group in groups)}[name]
                script = ["node", str(HERE / "tries.mjs")] if name == "node" else [where, str(HERE / "tries.py")]
                folder = Path(where) if name == "node" else Path(home)
                for client in clients:
                    one = await asyncio.to_thread(tried, [*script, client, recorder.url], folder, recorder)
                    rows += one[0]
                    sent += one[1]
            recorder.stop()
    lines = [json.dumps(row, ensure_ascii=False) for row in plain(sent)]
    (HERE / "recorded.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

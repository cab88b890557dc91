"""A full garbage collection in a process that serves looks at what requests made, not at what was there before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import asyncio, os, signal
from attn_gateway import GatewaySettings
from attn_gateway.cluster import ClusterSettings
from attn_gateway.serve import ServeSettings, serve

def announce(gateway):
    tell()
    os.kill(os.getpid(), signal.SIGTERM)

settings = ServeSettings(gateway=GatewaySettings(port=0), cluster=ClusterSettings(home=folder))
asyncio.run(serve(settings, announce, lambda cluster: []))
"""
CHILD = """
import asyncio
from attn_schema import EngineConfig
from attn_serve import engine_server
from attn_serve.replica_messages import EngineTask

class Parent:
    def send(self, loaded):
        tell()
        raise SystemExit

asyncio.run(engine_server._serve(Parent(), EngineTask(str(folder), EngineConfig(num_threads=1))))
"""
REPLICA = """
import asyncio
from attn_schema import EngineConfig
from attn_serve.ray_actors import ModelReplica

async def run():
    replica = ModelReplica.__new__(ModelReplica)
    await replica.__init__(folder, EngineConfig(num_threads=1), 0.0)
    tell()
    await replica.__del__()

asyncio.run(run())
"""
TELL = """
import json, sys
from pathlib import Path
from attn_gateway.standstills import GcHeap

folder = Path(sys.argv[1])

def tell():
    heap = GcHeap.now()
    Path(sys.argv[2]).write_text(json.dumps([heap.frozen, heap.collected]))
"""


@pytest.mark.parametrize("program", [SERVER, CHILD, REPLICA], ids=["the server", "an engine", "a replica"])
def test_what_was_there_at_the_start_is_not_collected_again(program: str, home: Path, tmp_path: Path) -> None:
    told = tmp_path / "heap.json"
    words = [sys.executable, "-c", TELL + program, str(home / "models" / "tiny"), str(told)]
    subprocess.run(words, check=True, cwd=tmp_path, timeout=250)
    frozen, collected = json.loads(told.read_text())
    assert frozen > 20_000
    assert collected < frozen / 20


FROZEN = """
from attn_gateway.standstills import freeze_gc_heap

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("freed")

kept = Cycle()
freeze_gc_heap()
"""


def test_cycles_that_were_frozen_are_freed_when_the_process_ends():
    """Libraries such as Triton's tell of objects that are left then, as if they had leaked."""
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, check=True)
    assert done.stdout == "freed\n"
    assert not done.stderr

"""Child processes: what is sent arrives in order, and neither side is left behind when the other ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attn_schema.child_process import Child

CHILDREN = """
import math, os, sys, threading, time
from attn_schema.child_process import Parent

def echo():
    parent = Parent()
    print("what is printed is no message")
    first = parent.task(list)
    ended = threading.Event()
    parent.send([first, os.environ["GIVEN"], math.nan])
    parent.follow(list, lambda message: (parent.send(message), ended.set() if message == ["end"] else None))
    ended.wait()

def wait():
    parent = Parent()
    parent.send(os.getpid())
    parent.follow(list, print)
    time.sleep(600)
"""
ORPHAN = """
from attn_schema.child_process import Child
child = Child("children:wait", {})
print(next(child.messages(int)), flush=True)
input()
"""


@pytest.fixture(autouse=True)
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "children.py").write_text(CHILDREN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_messages_arrive_as_they_are_and_in_order() -> None:
    child = Child("children:echo", {"GIVEN": "here"})
    for message in (["task"], *([number] * number for number in range(1, 50)), ["end"]):
        child.send(message)
    first, *rest = child.messages(list)
    assert first[:2] == [["task"], "here"]
    assert math.isnan(first[2])
    assert rest == [*([number] * number for number in range(1, 50)), ["end"]]
    assert child.ended(60) == "exited with code 0"
    child.send(["too late"])


def test_a_killed_child_says_so() -> None:
    child = Child("children:wait", {})
    messages = child.messages(int)
    assert next(messages) == child.pid
    assert child.ended(0.05) is None
    child.kill()
    assert list(messages) == []
    assert child.ended(60) == "was killed by SIGKILL"


def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.05)

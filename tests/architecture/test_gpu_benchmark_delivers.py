"""The GPU measurements deliver what they have found, whatever they lack and whenever they are cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workspace

pytest.importorskip("triton")

FOLDER = workspace.ROOT / "benchmarks" / "gpu"
WHOLE = [sys.executable, str(FOLDER / "everything.py")]
AT_ONCE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import parts
from parts import Part

held = threading.Event()

def apart(part, options, limit):
    yield {"part": part.name, "case": "first"}
    if part.module == "slow":
        assert held.wait(200)
        raise OSError("no process could be started")
    yield {"part": part.name, "seconds": 1}

parts.apart = apart
rows = parts.at_once([Part("slow", "x", 1), Part("quick", "x", 1)], [], [], 1)
before = [next(rows) for _ in range(3)]
held.set()
print(len(before), *[row.get("stopped") for row in rows], sep="; ")
"""


def result_in(folder: Path) -> dict[str, Any]:
    """The one result of a folder."""
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_for_each_table_what_is_lacking_and_writes_its_result(tmp_path: Path) -> None:
    alone = ["engine_gpu", "prompt_steps", "train_gpu", "sanitizer"]
    asked = [*WHOLE, "--device", "cuda", "--tables", "attention", "decoding", *alone]
    done = subprocess.run(
        asked, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 1, done.stderr[-2000:]
    result = result_in(tmp_path)
    stopped = {row["part"]: row["stopped"] for row in result["rows"] if "stopped" in row}
    assert {f"{name}.tables" for name in ("attention", "decoding", *alone[:-1])} <= stopped.keys()
    assert all("CUDA" in why and "imported" not in why for why in stopped.values()), stopped
    assert "CUDA" in result["lacks"]
    assert any("bar" in row for row in result["rows"])


def test_what_is_cut_off_has_left_the_rows_that_were_finished(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "TRITON_INTERPRET": "1"}
    asked = [*WHOLE, "--device", "cpu", "--small", "--tables", "chip"]
    with subprocess.Popen(asked, env=environment, stdout=subprocess.PIPE, text=True) as process:
        row = json.loads(next(iter(process.stdout or ())))
        process.kill()
    assert result_in(tmp_path)["rows"][0] == row
    assert row["case"] == "copy"


def test_verdicts_that_are_found_at_once_are_given_as_they_come() -> None:
    command = [sys.executable, "-c", AT_ONCE, str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout.strip() == "3; OSError: no process could be started", done.stderr[-2000:]

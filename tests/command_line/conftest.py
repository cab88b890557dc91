"""The real `attn` command in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ATTN = Path(sys.executable).with_name("attn")
Done = subprocess.CompletedProcess[str]


def run(*words: str) -> Done:
    environ = dict(os.environ, COLUMNS="200")
    return subprocess.run([ATTN, *words], capture_output=True, text=True, env=environ, check=False, timeout=240)


@pytest.fixture
def attn() -> Callable[..., Done]:
    """Runs `attn` with the given words."""
    return run


@pytest.fixture
def answer() -> Callable[..., Any]:
    """What `attn ... --json` answers."""

    def ask(*words: str) -> Any:
        done = run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask

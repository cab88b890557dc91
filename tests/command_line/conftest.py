"""The real `attn` command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import warm

Done = subprocess.CompletedProcess[str]


def run(*words: str) -> Done:
    return warm.attn(*words, environ={**os.environ, "COLUMNS": "200"})


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

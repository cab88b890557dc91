"""The contracts of .importlinter notice what they forbid, also inside a function."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import workspace

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
PLANTS = {
    "attn_cache": "import attn_models",
    "attn_cli": "def late():\n    import attn_engine",
    "attn_core": "def late():\n    import torch",
    "attn_engine": "import attn.v1.inference_pb2, attn_testing, pickle",
    "attn_models": "from attn_variants import plugin\nimport ray",
    "attn_train": "def late():\n    import attn_cache",
}
BROKEN = {"layers", "wire", "by-name", "kit", "clients", "light", "in-process", "banned", "training"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of every package beside one another, as a place to import from, with the contracts."""
    for package in workspace.packages().values():
        shutil.copytree(package.source, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(workspace.ROOT / ".importlinter", tmp_path)
    return tmp_path


def broken_contracts(folder: Path) -> set[str]:
    """The names of the contracts that the sources in a folder break."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-cache"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return set(re.findall(r"^(.+) BROKEN", done.stdout, re.MULTILINE))


def names_of_contracts() -> dict[str, str]:
    """What each contract of .importlinter is called, by its key."""
    text = (workspace.ROOT / ".importlinter").read_text("utf-8")
    return dict(re.findall(r"^\[importlinter:contract:(.+)\]\nname = (.+)$", text, re.MULTILINE))


def test_the_tree_keeps_every_contract(copy: Path) -> None:
    assert broken_contracts(copy) == set()


def test_every_contract_notices_a_breach(copy: Path) -> None:
    for package, code in PLANTS.items():
        (copy / package / "planted.py").write_text(f'"""Planted."""\n{code}\n', encoding="utf-8")
    names = names_of_contracts()
    assert set(names) == BROKEN
    assert broken_contracts(copy) == set(names.values())

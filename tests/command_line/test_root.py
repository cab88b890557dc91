"""`attn` itself: its version, the commands of packages that are not here, and completion in every shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import shipping
import workspace
from attn_cli.main import ELSEWHERE
from attn_core import installed

ATTN = str(Path(sys.executable).with_name("attn"))


def attn(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = dict(os.environ, COLUMNS="200") | environ
    return subprocess.run([ATTN, *words], capture_output=True, text=True, env=given, check=False, timeout=60)


def test_the_version_is_one_line() -> None:
    answer = attn("--version")
    assert answer.returncode == 0
    assert answer.stdout.startswith(f"attn {version('attn-cli')} ")
    assert len(answer.stdout.splitlines()) == 1


def test_every_command_of_ours_is_listed_with_a_package_that_brings_it() -> None:
    commands, packages = installed().commands, workspace.packages()
    owned = {name: commands.owner(name) for name in commands.names()}
    listed = {name: package for package, names in ELSEWHERE.items() for name in names}
    assert set(listed) == {name for name, owner in owned.items() if owner in packages and owner != "attn-cli"}
    for name, package in listed.items():
        assert owned[name] in workspace.closure({package}, packages), f"{package} does not bring attn {name}"


@pytest.mark.parametrize("line", shipping.install_sets(), ids=lambda line: line.label)
def test_what_readme_installs_brings_the_commands_that_it_promises(line: shipping.InstallSet) -> None:
    commands, brought = installed().commands, workspace.closure(set(line.packages), workspace.packages())
    assert {commands.owner(command) for command in line.commands} <= brought
    assert not line.commands or "attn-cli" in brought


def test_a_command_of_a_missing_package_says_what_to_install() -> None:
    answer = attn("train", ATTN_PLUGINS="attn-cli")
    assert answer.returncode == 2
    said = "the command 'train' is in the package attn-client, which is not installed here: pip install attn-client"
    assert answer.stderr.splitlines() == [f"attn: {said}"]


def bash(line: str) -> dict[str, str]:
    return {"_ATTN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}


def zsh(line: str) -> dict[str, str]:
    return {"_ATTN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}


def fish(line: str) -> dict[str, str]:
    return zsh(line) | {"_ATTN_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}


@pytest.mark.parametrize("shell", [bash, zsh, fish])
def test_commands_their_flags_and_mechanisms_are_completed(shell: Callable[[str], dict[str, str]]) -> None:
    assert "show" in attn(**shell("attn sho")).stdout
    assert "--hidden-size" in attn(**shell("attn show --hid")).stdout
    assert "sliding_window" in attn(**shell("attn show slid")).stdout

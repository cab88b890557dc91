"""`attn` itself: its version, the commands of packages that are not here, and completion in every shell."""

from __future__ import annotations

import os
import re
import shutil
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
from attn_core.errors import how_to_install
from attn_kernels_cpu import chip

ATTN = str(Path(sys.executable).with_name("attn"))


def attn(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = dict(os.environ, COLUMNS="200") | environ
    return subprocess.run([ATTN, *words], capture_output=True, text=True, env=given, check=False, timeout=60)


def test_the_version_is_a_line_and_beside_kernels_for_cpus_one_with_their_instruction_set() -> None:
    answer = attn("--version")
    assert answer.returncode == 0
    first, kernels = answer.stdout.splitlines()
    assert first.startswith(f"attn {version('attn-cli')} ")
    able = [found.name for found in chip.supported(chip.flags())]
    assert kernels.startswith(f"cpu kernels: {able[0] if able else 'none'}")
    assert kernels.endswith(f"(of {', '.join(chip.INSTRUCTION_SETS)})")
    assert attn("--version", ATTN_PLUGINS="attn-cli").stdout.splitlines() == [first]
    wrong = attn("--version", ATTN_CPU_ISA="mmx")
    assert wrong.returncode == 0
    assert "'mmx' is not allowed" in wrong.stdout


def test_a_version_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['attn', '--version']\n"
        "from attn_cli.main import application\n"
        "try:\n    application()()\nfinally:\n    print(sorted({'torch', 'numpy', 'grpc', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_quiet_leaves_stderr_to_errors_and_verbose_adds_to_it() -> None:
    varlen = ("explain", "sparsemax", "--varlen", "--training")
    plain, quiet, verbose = attn(*varlen), attn(*varlen, "-q"), attn("--verbose", *varlen)
    assert plain.stdout == quiet.stdout == verbose.stdout
    assert "computed alone" in plain.stderr
    assert quiet.stderr == ""
    assert re.fullmatch(re.escape(plain.stderr) + r"attn: \d+\.\d\d s\n", verbose.stderr)
    wrong, where = attn("-q", "show", "gq"), attn("show", "-v", "gq")
    assert (wrong.returncode, where.returncode) == (2, 2)
    assert wrong.stderr.startswith("attn: unknown mechanism 'gq'")
    assert "Traceback" in where.stderr
    assert wrong.stderr in where.stderr
    both = attn("-q", "list", "--verbose")
    assert both.returncode == 2
    assert "one of them" in both.stderr


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
    where = how_to_install("attn-client")
    said = f"the command 'train' is in the package attn-client, which is not installed here: {where}"
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


IN_A_SHELL = {
    "bash": """
source {script}
COMP_WORDS=(attn sho); COMP_CWORD=1
function=$(complete -p attn | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function attn sho attn
echo "${{COMPREPLY[@]}}"
""",
    "fish": 'source {script}; complete --do-complete "attn sho"',
    "zsh": r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'autoload -Uz compinit && compinit -u -D && source {script} && PS1=READY$((1+1))'
zpty -r shell seen '*READY2*'
zpty -w -n shell $'attn sho\t'
zpty -r shell seen '*attn show*' && echo show
zpty -d shell
""",
}
"""What a shell does with the script of `--show-completion` when a person types `attn sho` and Tab."""


@pytest.mark.parametrize("name", IN_A_SHELL)
def test_a_shell_completes_with_the_script_that_attn_shows(name: str, tmp_path: Path) -> None:
    if (shell := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "completion"
    script.write_text(attn("--show-completion", name, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout)
    path = os.pathsep.join([str(Path(ATTN).parent), os.environ["PATH"]])
    program = IN_A_SHELL[name].format(script=script)
    done = subprocess.run(
        [shell, "-c", program], capture_output=True, text=True, env=dict(os.environ, PATH=path, HOME=str(tmp_path)),
        check=False, timeout=280,
    )  # fmt: skip
    assert done.stdout.split()[0] == "show", done.stderr

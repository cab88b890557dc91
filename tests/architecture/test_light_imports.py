"""In a fresh interpreter: the contract, the client and the command line answer without loading what is heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"grpc", "numpy", "ray", "tokenizers", "torch", "transformers"}
SLOW_TO_START = {
    "asyncio",
    "attn_client.client",
    "attn_kernels_cpu.compiling",
    "attn_models.decoder",
    "attn_models.encoder_decoder",
    "attn_variants.kernels",
    "filelock",
    "pydantic",
}
"""What `attn list mechanisms` does without: together they take as long as all that it needs."""

PROGRAM = """
import sys
{code}
print(",".join(sorted({heavy!r} & set(sys.modules))))
"""


def heavy_after(code: str, heavy: set[str] = HEAVY) -> set[str]:
    """Those of the heavy modules that a new interpreter has loaded after running some code."""
    program = PROGRAM.format(code=code, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(filter(None, done.stdout.splitlines()[-1].split(",")))


def command(*words: str) -> str:
    """Code that runs the `attn` command as the terminal would, and insists that it succeeds."""
    return f"""
from attn_cli.main import main
sys.argv = ["attn", *{words!r}]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
"""


def test_the_contract_and_its_catalogue_load_nothing_heavy() -> None:
    code = "import attn_core\nattn_core.installed().mechanisms.names()"
    assert not heavy_after(code)


def test_importing_the_client_loads_neither_torch_nor_ray() -> None:
    assert heavy_after("import attn_client") <= {"grpc"}


@pytest.mark.parametrize(
    "words", [("--help",), ("list", "mechanisms"), ("list", "mechanisms", "--json"), ("plugins",)], ids=" ".join
)
def test_the_command_line_loads_nothing_heavy_to_answer_what_there_is(words: tuple[str, ...]) -> None:
    assert not heavy_after(command(*words))


@pytest.mark.parametrize("words", [("list",), ("list", "mechanisms"), ("list", "--json", "mechanisms")], ids=" ".join)
def test_listing_mechanisms_loads_only_what_it_prints(words: tuple[str, ...]) -> None:
    assert not heavy_after(command(*words), SLOW_TO_START)


def test_what_is_slow_to_start_is_there_to_be_avoided() -> None:
    code = "\n".join(f"import {name}" for name in sorted(SLOW_TO_START))
    assert heavy_after(code, SLOW_TO_START) == SLOW_TO_START


def test_help_asks_no_plugin_for_its_mechanisms() -> None:
    families = "attn_variants.mechanisms.offered"
    listed = f"import sys\nassert ({families!r} in sys.modules) == (sys.argv[1] == 'list')"
    for words in (("--help",), ("list", "mechanisms")):
        heavy_after(f"{command(*words)}\n{listed}")


def test_what_is_loaded_is_noticed() -> None:
    assert heavy_after("import numpy") == {"numpy"}

"""Every command can be read on terminals of 60, 80 and 120 columns: no line is longer, and no name is cut."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

SHOWN = (
    "list mechanisms", "list kernels", "list linears", "list caches", "list models", "list shapes", "list recipes",
    "list datasets", "plugins", "doctor", "models local", "chat --list", "show mla", "show sliding_window",
    "explain gqa --num-kv-heads 2", "cost llama-3-70b", "compare mha gqa --num-kv-heads 2 --seq 1024,65536",
)  # fmt: skip
PROGRAM = """
import json, pathlib, sys
import click
from attn_cli.main import load
from attn_core import installed

def every(command, words):
    yield command, words
    for name, inner in getattr(command, "commands", {}).items():
        yield from every(inner, [*words, name])

def run(command, words):
    print("\\x1e" + json.dumps(words), flush=True)
    command(words[1:], prog_name="attn " + words[0], standalone_mode=False)

names = {}
for top in installed().commands.names():
    whole = load(installed().commands.get(top))
    for inner, words in every(whole, [top]):
        names[" ".join(words)] = [name for param in inner.params for name in param.opts if name.startswith("-")]
        run(whole, [*words, "--help"])
for line in sys.argv[2:]:
    words = line.split()
    try:
        run(load(installed().commands.get(words[0])), words)
    except click.exceptions.Exit:
        pass
pathlib.Path(sys.argv[1]).write_text(json.dumps(names))
"""


def typed_on_a_terminal(columns: int, names: Path, home: Path) -> dict[str, str]:
    """What all commands print on a terminal of this width, by the words that are typed, without control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    given = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(names), *SHOWN],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**given, "TERM": "xterm", "ATTN_HOME": str(home)},
    ):
        os.close(theirs)
        printed = b""
        while True:
            try:
                printed += os.read(ours, 2**16)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()).replace("\r\n", "\n")
    parts = (part.partition("\n") for part in text.split("\x1e")[1:])
    return {" ".join(json.loads(words)): body for words, _, body in parts}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal_and_no_name_is_cut(columns: int, tmp_path: Path) -> None:
    printed = typed_on_a_terminal(columns, tmp_path / "names", tmp_path)
    assert set(SHOWN) <= printed.keys()
    for words, text in printed.items():
        assert text.strip(), words
        longer = [line for line in text.splitlines() if len(line) > columns and len(line.strip().split()) > 2]
        assert longer == [], words
        assert "Traceback" not in text, words
    for words, options in json.loads((tmp_path / "names").read_text()).items():
        assert [name for name in options if name not in printed[f"{words} --help"]] == [], words

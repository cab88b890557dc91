"""The tutorial and a translation by commands, as they are written, in folders outside the tree and with a server.

Three things are not as written: `pip` installs into a folder of the test, from the tree and not from an index; the
server has a port of its own, as another may have the usual one; and training takes fewer steps.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PIP = """#!/bin/sh
case "$*" in
  "install -e .") exec "{python}" -m pip install -q --no-deps --no-build-isolation --target "{site}" . ;;
  "install attn-testing pytest") exit 0 ;;
  *) echo "pip $* was not expected" >&2; exit 1 ;;
esac
"""
STEPS = 8


class Reader:
    """Somebody with a home of her own, who types what a document says."""

    def __init__(self, folder: Path) -> None:
        self.home, self.tree, self.site = folder / "home", folder / "tree", folder / "site"
        tools = folder / "bin"
        for made in (self.home, self.site, tools):
            made.mkdir(parents=True)
        pip = tools / "pip"
        pip.write_text(PIP.format(python=sys.executable, site=self.site))
        pip.chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        texts = Path(os.environ.get("ATTN_HOME", Path.home() / ".local/share/attn")) / "texts"
        if texts.exists():  # else it is fetched, as it would be for her
            shutil.copytree(texts, self.home / ".local/share/attn/texts")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "ATTN_HOME"},
            "HOME": str(self.home),
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(self.site),
            "ATTN_ADDRESS": f"127.0.0.1:{self.port}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def script(self, text: str) -> str:
        """The commands of a document as a shell runs them, in order, each shown before it runs."""
        lines = [line.removeprefix("$ ") for line in text.splitlines() if line.strip()]
        changed = [re.sub(r"--steps \d+", f"--steps {STEPS}", line) for line in lines]
        return "\n".join(line.replace("attn serve", f"attn serve --port {self.port}") for line in changed)

    def program(self, document: str) -> str:
        """All blocks of a document as one script of the shell: commands, files that are written, and Python."""
        parts = ["set -e"]
        for number, (language, file, text) in enumerate(BLOCK.findall(document)):
            end = f"END_OF_BLOCK_{number}"
            if file:
                parts.append(f"cat > {file} <<'{end}'\n{text}{end}")
            elif language == "python":
                parts.append(f"python - <<'{end}'\n{text}{end}")
            elif language == "console":
                parts.append("set -x\n" + self.script(text) + "\n{ set +x; } 2>/dev/null")
        return "\n".join(parts)

    def types(self, program: str) -> str:
        """What the program prints; fails with all of it where a command does. The server goes when it is done."""
        command = ["bash", "-c", f"trap '{{ set +x; kill $(jobs -p); wait; }} 2>/dev/null' EXIT\n{program}"]
        with subprocess.Popen(
            command,
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            try:
                out, _ = shell.communicate(timeout=280)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                out, _ = shell.communicate()
                pytest.fail(f"it takes too long; so far:\n{out[-6000:]}")
        assert shell.returncode == 0, out[-6000:]
        return out


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    found = Reader(tmp_path)
    shutil.copytree(ROOT / "plugins/attn-plugin-template", found.tree / "plugins/attn-plugin-template")
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_the_tutorial_ends_with_an_answer_of_the_mechanism_that_it_wrote(reader: Reader) -> None:
    document = (ROOT / "docs/tutorial.md").read_text("utf-8")
    out = reader.types(reader.program(document))
    assert "kerple_power" in out
    assert re.search(r"\d+ passed", out)
    assert " failed" not in out
    assert "kerple succeeded" in out
    answer = out.partition("+ attn generate kerple")[2].partition("\n")[2].replace("+ set +x", "")
    assert len(answer.strip()) > 10, out[-1000:]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_translation_of_the_examples_knows_its_words(reader: Reader) -> None:
    text = (ROOT / "docs/start/commands.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if re.match(r"attn (train --job|models load) swapped", line)]
    assert len(lines) == 2
    trained = f"{lines[0].partition(' #')[0].rstrip()} --steps {STEPS} --bleu-sentences 0"
    (sentence,) = re.findall(r'attn translate swapped "([^"]+)"', lines[1])
    waited = "until [ -e ready.json ]; do sleep 1; done"
    served = reader.script(f"attn serve --log-level warning --ready-file ready.json &\n{waited}\n{trained}")
    out = reader.types(f"set -e\n{served}\n{lines[1]}")
    said = out.partition("swapped is serving")[2].partition("\n")[2].replace("+ set +x", "").split()
    assert all(re.fullmatch(r"t\d+", word) for word in said), out  # after so few steps it may say nothing
    words = (reader.home / ".local/share/attn/models/swapped/tokenizer.json").read_text("utf-8")
    assert all(f'"{word}"' in words for word in sentence.split()), sentence
    assert '"dog"' not in words

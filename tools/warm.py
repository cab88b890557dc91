"""Runs programs in processes that begin warm: forked from one that has imported torch and every installed plugin.

A test of a command or a document needs a process of its own, and would spend nine tenths of its time on imports. The
process is forked before anything runs: no catalogue is made, no thread is started, and what the environment says is
read anew, but for what a module reads while it is imported.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = """
import atexit, gc, importlib.metadata, json, os, sys, traceback
import torch, attn_cli.main
for point in importlib.metadata.entry_points(group="attn.plugins"):
    point.load()
gc.collect()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    _, status, used = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
else:
    os._exit(0)
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["environ"])
for number, path in enumerate(job["files"]):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
sys.argv, sys.path[0] = job["argv"], job["cwd"]
sys.stdin = open(0, encoding="utf-8", closefd=False)
status = 0
try:
    exec(compile(job["program"], "<program>", "exec"), {"__name__": "__main__"})
except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if ended.code is not None and not isinstance(ended.code, int):
        print(ended.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    status = 1
# An interpreter that ends by itself would copy every page that it was forked with.
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
COMMAND = "from attn_cli.main import main; main()"


class Warm:
    """The process from which others are forked, started when first needed, and the seconds that those have used."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.spent = 0.0

    def start(self) -> subprocess.Popen[str]:
        """The process; it ends with this one."""
        if self.server is None or self.server.poll() is not None:
            command = [sys.executable, "-c", SERVER]
            self.server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            atexit.register(self.stop, self.server)
        return self.server

    @staticmethod
    def stop(server: subprocess.Popen[str]) -> None:
        """End a process and what was forked from it."""
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def run(
        self, program: str, argv: Sequence[str], *, environ: Mapping[str, str], cwd: Path, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and return its exit status, output and messages; whatever interrupts this ends the program."""
        server = self.start()
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("in", "out", "err")]
            for file in files:
                file.write_text(given if file.name == "in" else "", encoding="utf-8")
            job = {"program": program, "argv": list(argv), "environ": dict(environ), "cwd": str(cwd)}
            try:
                print(json.dumps(job | {"files": list(map(str, files))}), file=server.stdin, flush=True)
                status, spent = json.loads(server.stdout.readline())  # type: ignore[union-attr]  # pipes, both
            except BaseException:
                self.stop(server)
                raise
            self.spent += spent
            out, err = (file.read_text("utf-8") for file in files[1:])
        return subprocess.CompletedProcess(list(argv), status, out, err)


WARM = Warm()


def run(
    program: str,
    argv: Sequence[str] = ("-",),
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `python -` would, with these arguments and this text as its input."""
    return WARM.run(program, argv, environ=environ, cwd=cwd or Path.cwd(), given=given)


def attn(
    *words: str, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command `attn`."""
    return run(COMMAND, ("attn", *words), environ=environ, cwd=cwd)

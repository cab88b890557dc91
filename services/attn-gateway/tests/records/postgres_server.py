"""A PostgreSQL server of our own, in a temporary folder, run by a user without privileges."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=16MB", "listen_addresses=")


def programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`, which Debian keeps off the PATH; None where there are none."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class PostgresServer:
    """Started and stopped at will; `url` is where it answers."""

    def __init__(self, folder: Path, bin_: Path, user: str | None) -> None:
        self._folder, self._bin, self._user = folder, bin_, user
        name = user or pwd.getpwuid(os.getuid()).pw_name
        self.url = f"postgresql+psycopg://{name}@/postgres?host={folder}"
        self._run("initdb", "-D", folder / "data", "-A", "trust", "-U", name, "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Answer calls when this returns."""
        options = f"-k {self._folder} " + " ".join(f"-c {option}" for option in FAST)
        self._control("start", "-w", "-o", options, "-l", str(self._folder / "log"))

    def stop(self) -> None:
        """End all sessions, as for a restart."""
        self._control("stop", "-m", "fast", "-w")

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all processes of the server inside the block: connections stay, and nothing is answered."""
        first = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        processes = [psutil.Process(first), *psutil.Process(first).children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def execute(self, statement: str) -> None:
        """Run a statement on its own."""
        import psycopg

        name = self.url.split("//")[1].split("@")[0]
        where = f"host={self._folder} user={name} dbname=postgres"
        with psycopg.connect(where, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    def _control(self, *words: str) -> None:
        self._run("pg_ctl", "-D", self._folder / "data", *words)

    def _run(self, program: str, *words: object) -> None:
        # Not `user=` of subprocess, which forks: gRPC may abort in the copy of a process that is amid calls.
        become = ["setpriv", "--reuid", self._user, "--regid", self._user, "--clear-groups"] if self._user else []
        command = [*become, str(self._bin / program), *map(str, words)]
        done = subprocess.run(command, cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, done.stdout.decode()


@contextmanager
def postgres_server(bin_: Path) -> Iterator[PostgresServer]:
    """A server that runs inside the block. PostgreSQL refuses to run as root: then it is Debian's user `postgres`."""
    user = "postgres" if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="attn-postgres-"))
    folder.chmod(0o755)
    if user:
        shutil.chown(folder, user)
    try:
        server = PostgresServer(folder, bin_, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_not() -> str | None:
    """Why there can be no server here; None if there can."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "PostgreSQL does not run as root, and there is no user postgres"
    return None

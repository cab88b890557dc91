"""Leases: one holder of a name at a time, on any machine, with fencing tokens.

A lease that is not renewed expires. Its old holder may not notice at once, so what it does under the lease carries the
token, and whoever records it refuses a token that is not the newest (Kleppmann 2016, "How to do distributed locking").
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from attn_core.errors import Unavailable, WrongState
from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from attn_storage.database import Database
from attn_storage.tables import leases

LEASE_SECONDS = 15.0
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


class LeaseLost(WrongState):
    """Somebody else has the lease by now; what was done under it must not be recorded."""

    reason = "LEASE_LOST"


@dataclass(frozen=True)
class Lease:
    """A name that is held. `token` is higher than that of every holder before."""

    name: str
    token: int
    holder: str


class Leases:
    """Leases in a database. All times are those of the database, or of the machine where that is SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Hold `name` for `seconds`; raises `Unavailable` while somebody else does.

        A holder whose process is gone holds nothing any more; for one of another machine that is known once its time
        is over.
        """
        holder = f"{this_process()}/{uuid.uuid4().hex}"
        try:
            return self._acquire(name, holder, seconds)
        except IntegrityError:
            # Two of the first holders of a name came at once.
            raise Unavailable(f"{name} is held by another process", name=name) from None

    def _acquire(self, name: str, holder: str, seconds: float) -> Lease:
        with self._database.writing() as connection:
            now = database_time(connection)
            query = select(leases).where(leases.c.name == name).with_for_update()
            found = connection.execute(query).mappings().first()
            if found is None:
                values = {"name": name, "holder": holder, "token": 1, "expires": now + seconds}
                connection.execute(insert(leases).values(values))
                return Lease(name, 1, holder)
            if found["expires"] > now and not is_gone(found["holder"]):
                raise Unavailable(f"{name} is held by another process", name=name)
            token = int(found["token"]) + 1
            values = {"holder": holder, "token": token, "expires": now + seconds}
            connection.execute(update(leases).where(leases.c.name == name).values(values))
        return Lease(name, token, holder)

    def renew(self, lease: Lease, seconds: float = LEASE_SECONDS) -> None:
        """Hold it for `seconds` from now; raises `LeaseLost` if another holder has it."""
        with self._database.writing() as connection:
            self._set(connection, lease, database_time(connection) + seconds)

    def require(self, connection: Connection, lease: Lease) -> None:
        """Within a transaction: raise `LeaseLost` unless `lease` is still the newest of its name."""
        query = select(leases.c.token).where(leases.c.name == lease.name).with_for_update()
        if connection.execute(query).scalar() != lease.token:
            raise LeaseLost(f"{lease.name} has another holder by now", name=lease.name)

    def release(self, lease: Lease) -> None:
        """Let others have it; nothing happens if another has it already."""
        with suppress(LeaseLost), self._database.writing() as connection:
            self._set(connection, lease, 0.0)

    def overdue(self, names: Sequence[str]) -> dict[str, float]:
        """For how many seconds each lease is over whose holder neither renewed nor released it."""
        with self._database.reading() as connection:
            query = select(leases.c.name, leases.c.expires).where(leases.c.name.in_(names))
            now = database_time(connection)
            return {name: now - expires for name, expires in connection.execute(query) if 0 < expires < now}

    @contextmanager
    def held(self, name: str, seconds: float = LEASE_SECONDS) -> Iterator[Lease]:
        """Hold `name` inside the block, renewed by a thread; raises `Unavailable` while somebody else holds it."""
        lease = self.acquire(name, seconds)
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(seconds / 3):
                # Without the database nothing can be recorded; whoever has it then finds the old token.
                with suppress(Unavailable):
                    try:
                        self.renew(lease, seconds)
                    except LeaseLost:
                        return

        thread = threading.Thread(target=renew, name=f"lease {name}", daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            ended.set()
            thread.join()
            with suppress(Unavailable):
                self.release(lease)

    def _set(self, connection: Connection, lease: Lease, expires: float) -> None:
        mine = (leases.c.name == lease.name) & (leases.c.token == lease.token)
        if not connection.execute(update(leases).where(mine).values(expires=expires)).rowcount:
            raise LeaseLost(f"{lease.name} has another holder by now", name=lease.name)


def this_process() -> str:
    """A name of this process that no other has: machine, its numbering of processes, number, time of its start."""
    return f"{_machine()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def is_gone(holder: str) -> bool:
    """Whether a holder is known to have ended: a process of this machine that does not run."""
    parts = holder.split("/")
    if len(parts) < 3 or parts[0] != _machine():
        return False
    try:
        return f"{psutil.Process(int(parts[1])).create_time():.2f}" != parts[2]
    except (psutil.NoSuchProcess, ValueError):
        return True
    except psutil.Error:
        return False


def _machine() -> str:
    try:
        return f"{BOOT.read_text().strip()}-{PROCESSES.readlink()}".replace("/", "-")
    except OSError:
        return f"{uuid.getnode():x}"


def database_time(connection: Connection) -> float:
    """Seconds since 1970 by the clock of the database, or of this machine where that is SQLite."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())::float8")).scalar_one())
    return float(connection.execute(text("SELECT (julianday('now') - 2440587.5) * 86400.0")).scalar_one())

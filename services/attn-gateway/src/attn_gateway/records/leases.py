"""Leases: one holder of a name at a time, on any machine, with fencing tokens.

A lease that is not renewed expires. Its old holder may not notice at once, so what it writes under the lease carries
the token, and a token that is not the newest is refused (Kleppmann 2016, "How to do distributed locking").
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

from attn_gateway.records.database import Database
from attn_gateway.records.tables import leases

LEASE_SECONDS = 15.0
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


class LeaseLost(WrongState):
    """Another holder has acquired the lease since; results of work under it must not be recorded."""

    reason = "LEASE_LOST"


@dataclass(frozen=True)
class Lease:
    """A lease on a name. `token` is higher than that of every earlier holder."""

    name: str
    token: int
    holder: str


class Leases:
    """Leases in a database. All times are by the database's clock, or this machine's if it is SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, seconds: float = LEASE_SECONDS) -> Lease:
        """Acquire the lease on `name` for `seconds`; raises `Unavailable` while another process holds it.

        The lease of a process that has ended is free: on this machine at once, on another one when it expires.
        """
        holder = f"{this_process()}/{uuid.uuid4().hex}"
        try:
            return self._acquire(name, holder, seconds)
        except IntegrityError:
            # Two processes inserted the first lease on this name at the same time.
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
        """Extend the lease to `seconds` from now; raises `LeaseLost` if another holder has it."""
        with self._database.writing() as connection:
            self._set(connection, lease, database_time(connection) + seconds)

    def require(self, connection: Connection, lease: Lease) -> None:
        """Raise `LeaseLost`, within a transaction, unless `lease` is still the newest of its name."""
        query = select(leases.c.token).where(leases.c.name == lease.name).with_for_update()
        if connection.execute(query).scalar() != lease.token:
            raise LeaseLost(f"the lease {lease.name} has been taken over by another holder", name=lease.name)

    def release(self, lease: Lease) -> None:
        """End the lease, so that others can acquire it; does nothing if another holder already has it."""
        with suppress(LeaseLost), self._database.writing() as connection:
            self._set(connection, lease, 0.0)

    def overdue(self, names: Sequence[str]) -> dict[str, float]:
        """The seconds since each of these leases expired, for those that were neither renewed nor released."""
        with self._database.reading() as connection:
            query = select(leases.c.name, leases.c.expires).where(leases.c.name.in_(names))
            now = database_time(connection)
            return {name: now - expires for name, expires in connection.execute(query) if 0 < expires < now}

    @contextmanager
    def held(self, name: str, seconds: float = LEASE_SECONDS) -> Iterator[Lease]:
        """Hold a lease on `name` inside the block, renewed by a thread; raises `Unavailable` while another has it."""
        lease = self.acquire(name, seconds)
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(seconds / 3):
                # Without the database nothing can be recorded; once it is back, an old token is refused.
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
            # The lease then expires; the error that ended the block, if any, is the one to tell.
            with suppress(Unavailable, WrongState):
                self.release(lease)

    def _set(self, connection: Connection, lease: Lease, expires: float) -> None:
        this_lease = (leases.c.name == lease.name) & (leases.c.token == lease.token)
        if not connection.execute(update(leases).where(this_lease).values(expires=expires)).rowcount:
            raise LeaseLost(f"the lease {lease.name} has been taken over by another holder", name=lease.name)


def this_process() -> str:
    """A unique name of this process: machine (boot id and PID namespace), process id and start time."""
    return f"{_machine()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def is_gone(holder: str) -> bool:
    """Whether a holder is known to have ended: it is a process of this machine that no longer runs."""
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
    """Seconds since 1970 by the clock of the database, or of this machine if that is SQLite."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())::float8")).scalar_one())
    return float(connection.execute(text("SELECT (julianday('now') - 2440587.5) * 86400.0")).scalar_one())

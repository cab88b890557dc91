"""A name has one holder at a time, and who lost it can record nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time

import pytest
from attn_core.errors import Unavailable
from attn_gateway.records import Lease, Leases
from attn_gateway.records.leases import LeaseLost, is_gone, this_process


@pytest.fixture
def leases(database) -> Leases:
    return Leases(database)


def test_a_name_has_one_holder_and_tokens_only_rise(leases):
    first = leases.acquire("a")
    with pytest.raises(Unavailable, match="held"):
        leases.acquire("a")
    other = leases.acquire("b")
    leases.release(first)
    second = leases.acquire("a")
    assert (first.token, second.token, other.token) == (1, 2, 1)


def test_who_did_not_renew_in_time_loses_the_lease_and_notices(leases, database):
    old = leases.acquire("a", seconds=0.05)
    time.sleep(0.1)
    new = leases.acquire("a")
    assert new.token > old.token
    with pytest.raises(LeaseLost):
        leases.renew(old)
    with pytest.raises(LeaseLost), database.writing() as connection:
        leases.require(connection, old)
    with database.writing() as connection:
        leases.require(connection, new)
    leases.release(old)
    with pytest.raises(Unavailable):
        leases.acquire("a")


def test_a_lease_is_renewed_for_as_long_as_its_block_runs(leases):
    with leases.held("a", seconds=2.0):
        time.sleep(3.0)
        with pytest.raises(Unavailable):
            leases.acquire("a")
    leases.acquire("a")


def test_of_many_who_come_at_once_one_holds_it(leases):
    held: list[Lease] = []
    barrier = threading.Barrier(6)

    def take() -> None:
        barrier.wait()
        with contextlib.suppress(Unavailable):
            held.append(leases.acquire("a"))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1


def test_a_process_of_this_machine_that_died_holds_nothing(leases, url):
    script = f"""
import os
from attn_gateway.records import Database, Leases
Leases(Database({url!r})).acquire("a", seconds=1000)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 9
    assert leases.acquire("a").token == 2


def test_what_runs_on_another_machine_is_not_taken_for_dead():
    machine, number, began = this_process().split("/")
    assert not is_gone(this_process())
    assert not is_gone(f"another-machine/{number}/{began}")
    assert is_gone(f"{machine}/{number}/1.00")
    assert is_gone(f"{machine}/4194303999/{began}")

"""The CPU cores and the memory that this process may use, and how the threads of OpenMP share cores."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SPIN_COUNT = "GOMP_SPINCOUNT"


def usable_cores(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The number of cores in the process's CPU affinity, or its control group's CPU quota if that is less; at least 1.

    A container often gets a share of the time of many cores. With one thread per visible core, all threads would then
    be throttled together in the middle of a matrix product, again and again. Both versions of Linux's control groups
    are read, parent groups included; a limit that cannot be read is ignored.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [limit for folder in _groups(cgroups, membership) if (limit := _limit(folder)) is not None]
    return max(1, min([cores, *(math.ceil(limit) for limit in limits)]))


def rank_cores(ranks: int) -> int:
    """The number of usable cores for each of `ranks` model ranks that share this machine; at least 1."""
    return max(1, usable_cores() // ranks)


def usable_memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The machine's memory in bytes, or the limit of the process's control groups (version 2) if that is less."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _groups(cgroups, membership):
        with suppress(OSError, ValueError):  # no file, or "max"
            most = min(most, int((folder / "memory.max").read_text()))
    return most


def brief_spins() -> dict[str, str]:
    """The environment variables of a process whose OpenMP threads spin only briefly at a barrier before they sleep.

    By default GNU OpenMP spins for about a millisecond at each of the several hundred barriers of a step. On a machine
    with other work, the thread that is waited for cannot run meanwhile: two threads were ten times slower than one.
    With this setting threads spin for some ten microseconds, which is longer than the others take on an idle machine.
    GOMP_SPINCOUNT of this process, if it is set, has precedence.
    """
    return {SPIN_COUNT: os.environ.get(SPIN_COUNT, "10000")}


def _groups(cgroups: Path, membership: Path) -> list[Path]:
    """The cgroup folders of the process and of its parent groups, and the root (a container's own group)."""
    found = [cgroups, cgroups / "cpu"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = cgroups if controllers == "" else cgroups / "cpu"
            own = root / path.lstrip("/")
            found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return found


def _limit(folder: Path) -> float | None:
    """The CPU quota of a control group, in cores; None if there is no limit."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None

"""How many cores this process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that the process may run on, or that its control group pays for where that is fewer; at least one.

    A container is often given some of the time of many cores: as many threads as there are cores would then be stopped
    together in the middle of a product, again and again. Both versions of Linux's control groups are read, those of all
    groups above too; what cannot be read limits nothing.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [limit for folder in _groups(cgroups, membership) if (limit := _limit(folder)) is not None]
    return max(1, min([cores, *(math.ceil(limit) for limit in limits)]))


def rank_cores(ranks: int) -> int:
    """The usable cores of each rank of a model, where so many ranks share this machine; at least one."""
    return max(1, usable_cores() // ranks)


def _groups(cgroups: Path, membership: Path) -> list[Path]:
    """The folders of the process's group and of those above it; the root, which in a container is the own group."""
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
    """Cores' worth of time that a group may use; None where there is no limit."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None

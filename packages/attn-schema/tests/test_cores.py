"""Threads are no more than the cores that a process may keep busy."""

from __future__ import annotations

import os

import pytest
from attn_schema.cores import usable_cores, usable_memory

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cores(tmp_path, files, membership="0::/box/inner\n"):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    return usable_cores(tmp_path, tmp_path / "membership")


V1 = "4:cpu,cpuacct:/box\n"


@pytest.mark.parametrize(
    ("files", "membership"),
    [
        ({"cpu.max": "100000 100000\n"}, "0::/\n"),
        ({"box/cpu.max": "50000 100000\n", "box/inner/cpu.max": "max 100000\n"}, "0::/box/inner\n"),
        ({"cpu/box/cpu.cfs_quota_us": "20000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, V1),
    ],
    ids=["own group", "a group above", "version 1"],
)
def test_a_limit_of_time_limits_threads(tmp_path, files, membership):
    assert cores(tmp_path, files, membership) == 1


@pytest.mark.parametrize(
    "files", [{}, {"cpu.max": "max 100000\n"}, {"cpu.max": "900000000 100000\n"}, {"cpu.max": "broken"}]
)
def test_without_a_limit_all_cores_that_the_process_may_run_on_are_used(tmp_path, files):
    assert cores(tmp_path, files, "0::/\n") == HERE


def test_where_nothing_can_be_read_all_cores_are_used(tmp_path):
    assert usable_cores(tmp_path / "none", tmp_path / "neither") == HERE


def test_memory_is_that_of_the_machine_or_of_the_tightest_group(tmp_path):
    machine = usable_memory(tmp_path / "none", tmp_path / "neither")
    assert 1 << 28 < machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "membership").write_text("0::/box/inner\n")
    for folder, text in (("box/inner", "max\n"), ("box", "123456789\n"), (".", f"{1 << 62}\n")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(text)
    assert usable_memory(tmp_path, tmp_path / "membership") == 123456789

"""A process that trains keeps its memory, and its threads do not wait in circles."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys, threading, psutil, torch
    from attn_train.process_tuning import keep_freed_memory

    def run():
        made = [torch.ones(1 << 18) for _ in range(64)]
        taken = psutil.Process().memory_info().rss
        del made
        print(taken - psutil.Process().memory_info().rss)

    if sys.argv[1] == "keep":
        keep_freed_memory()
    for work in (threading.Thread(target=run), threading.Thread(target=run)):
        work.start()
        work.join()
    run()
    """
)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_what_is_freed_stays_with_the_process_in_every_thread_and_only_when_asked():
    returned = {}
    for how in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        returned[how] = [int(count) >> 20 for count in done.stdout.split()]
    assert max(returned["keep"]) < 8
    assert max(returned["default"]) > 56


def test_the_actor_of_a_worker_sets_its_threads_up_before_torch_is_there():
    program = (
        "import os, sys; from attn_train.on_ray import RayWorkerActor;"
        "before = 'torch' in sys.modules; RayWorkerActor(); print(before, os.environ['GOMP_SPINCOUNT'])"
    )
    for environ, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        given = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"} | environ
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=given)
        assert done.stdout.split() == ["False", expected]

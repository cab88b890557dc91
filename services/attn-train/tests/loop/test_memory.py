"""A process that trains keeps its memory."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_the_same_work_done_again_takes_no_new_pages_also_in_another_thread():
    program = textwrap.dedent(
        """
        import resource, threading, torch
        from attn_train.memory import keep_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                made = [torch.zeros(1 << 18) for _ in range(20)]
                del made
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        def run(found):
            faults()
            found.append(faults())

        torch.set_num_threads(1)
        keep_freed_memory()
        found = []
        thread = threading.Thread(target=run, args=(found,))
        thread.start()
        thread.join()
        run(found)
        print(*found)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    pages = 10 * 20 * (1 << 20) // 4096
    assert all(int(count) < pages / 20 for count in done.stdout.split())

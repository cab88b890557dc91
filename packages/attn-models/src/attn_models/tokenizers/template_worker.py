"""Rendering chat templates outside this process, in one helper process kept for all of them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from attn_core.errors import UserError

from attn_models.tokenizers import template_child


class TemplateWorker:
    """One `template_child` process, started when first needed and again after a template killed it.

    Calls are made one after the other; a usual render takes well under a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text of `template` with `values`.

        Raises UserError with what the template raised, or when it ran beyond a second or its memory.
        """
        request = json.dumps({"template": template, "values": dict(values)}) + "\n"
        with self._lock:
            line = self._exchange(request)
        if not line:
            raise UserError("the chat template ran for more than a second or out of memory")
        reply = json.loads(line)
        if "error" in reply:
            raise UserError(f"the chat template failed: {reply['error']}")
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End the process; the next render starts another."""
        with self._lock:
            self._drop()

    def _exchange(self, request: str) -> str:
        child = self._running()
        if child.stdin is None or child.stdout is None:
            return ""
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            # An interrupted call leaves an answer in the pipe that would be taken for the next one's.
            self._drop()
            raise
        if not line.endswith("\n"):
            self._drop()
            return ""
        return line

    def _running(self) -> subprocess.Popen[str]:
        # After a fork the parent's child is not ours to talk to.
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            # As a script (-P: without its folder on the path) it starts in a tenth of a second.
            command = [sys.executable, "-P", template_child.__file__]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
            )
            self._owner = os.getpid()
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.communicate()


_WORKER = TemplateWorker()
atexit.register(_WORKER.close)


def render_template(template: str, values: Mapping[str, Any]) -> str:
    """The text of a chat template, rendered by the worker that this process keeps; raises like it."""
    return _WORKER.render(template, values)

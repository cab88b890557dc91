"""What a host delivers, for tests that read it request by request."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from attn_engine import RequestOutput
from attn_engine.client import TextTask


class Outputs(queue.SimpleQueue[Sequence[RequestOutput]]):
    """What a host delivers, request by request."""

    def of(self, task: TextTask) -> list[RequestOutput]:
        found: list[RequestOutput] = []
        while not (found and found[-1].last):
            found += [output for output in self.get(timeout=60) if output.request_id.startswith(task.id)]
        return found

"""An engine on a GPU that is pretended, whose kernels of Triton are counted and not computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_core.kernels.measured import table_here
from attn_core.kernels.rowwise import row_table
from attn_testing.pretend_cuda import PretendCuda, tensors_in


@pytest.fixture
def gpu(monkeypatch) -> Iterator[PretendCuda]:
    """Counts what a GPU would be asked; kernels are chosen as on an H200."""
    counter = PretendCuda()

    def run(launch, _):
        if launch.programs:
            pointers = tuple(tensor.data_ptr() for tensor in tensors_in(tuple(launch.call)))
            counter.launched(launch.program.__name__, launch.programs, pointers)

    monkeypatch.setattr("attn_core.kernels.devices.has_gpu", lambda: True)
    monkeypatch.setattr("attn_kernels_triton.launch.Launch.run", run)
    for module in ("paged.bucket", "products"):
        monkeypatch.setattr(f"attn_kernels_triton.{module}.processors", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    # What an earlier test of this process found on a machine without a GPU.
    for cached in (row_table, table_here):
        cached.cache_clear()
    with counter, torch.inference_mode():
        yield counter
    for cached in (row_table, table_here):
        cached.cache_clear()

from __future__ import annotations

from attn_core import OneOf
from attn_kernels_triton.kernels.attend import TritonAttend
from attn_testing import KernelLaws


class Interpreted(TritonAttend):
    """The kernel as it is, but for the device: interpreted, it computes on the CPU."""

    accepts = {**TritonAttend.accepts, "device": OneOf("cpu")}

    def available(self):
        return None


class TestAttend(KernelLaws):
    kernel = Interpreted()

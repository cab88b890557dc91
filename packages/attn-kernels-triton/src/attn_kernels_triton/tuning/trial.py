"""What is measured of a candidate."""

from __future__ import annotations

from typing import NamedTuple

from attn_kernels_triton.launch import Launch
from attn_kernels_triton.tuning.candidates import Candidate


class Trial(NamedTuple):
    """A candidate of a kind, by its name, and the launches that take the time."""

    name: str
    candidate: Candidate
    launches: tuple[Launch, ...]

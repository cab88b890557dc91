"""`python -m attn_kernels_triton.tuning`: measure this machine's GPU, and keep what is the fastest there."""

from __future__ import annotations

import sys

import torch

from attn_kernels_triton.attention.dense import has_copier
from attn_kernels_triton.machine import absence
from attn_kernels_triton.tuning.chosen import name_of
from attn_kernels_triton.tuning.measure import best, measure
from attn_kernels_triton.tuning.table import add


def main() -> int:
    """Print every measurement, then where the fastest are kept; 1 where there is nothing to tune."""
    why = absence()
    device = torch.device("cpu" if why else "cuda")
    if why is None and not has_copier(device):
        why = "only chips that copy tiles by themselves have a choice: compute capability 9.0 and more"
    if why:
        sys.stderr.write(f"{why}\n")
        return 1
    found = []
    for one in measure(device):
        found.append(one)
        said = " ".join(map(str, one.choice))
        sys.stdout.write(f"{one.kind.name:20} {said:32} {1e3 * one.seconds:9.3f} ms\n")
    sys.stdout.write(f"kept in {add(name_of(device), best(found))}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

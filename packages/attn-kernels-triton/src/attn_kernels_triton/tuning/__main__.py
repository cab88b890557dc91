"""`python -m attn_kernels_triton.tuning`: tune the kernels for this machine's GPU and store the fastest candidates."""

from __future__ import annotations

import sys

import torch

from attn_kernels_triton.attention.forward import has_copier
from attn_kernels_triton.machine import absence
from attn_kernels_triton.tuning.candidates import Candidate
from attn_kernels_triton.tuning.measure import EACH, best, measure
from attn_kernels_triton.tuning.store import add, name_of
from attn_kernels_triton.tuning.trials import count


def main() -> int:
    """Print every measurement and where the fastest candidates are stored; return 1 if there is nothing to tune."""
    why = absence()
    device = torch.device("cpu" if why else "cuda")
    if why is None and not has_copier(device):
        why = "nothing to tune: only GPUs with TMA (compute capability 9.0 or more) have several candidates"
    if why:
        sys.stderr.write(f"{why}\n")
        return 1
    number = count()
    sys.stdout.write(f"{number} candidates: attention (forward, backward), paged decoding, linear recurrences\n")
    sys.stdout.write(f"about {-(-number * EACH // 60)} minutes, mostly for compiling kernels that are not cached yet\n")
    found = []
    for one in measure(device):
        found.append(one)
        sys.stdout.write(f"{one.name:28} {formatted(one.choice):64} {1e3 * one.seconds:9.3f} ms\n")
    fastest = best(found)
    for name, choice in fastest.items():
        sys.stdout.write(f"{name:28} {formatted(choice)}\n")
    sys.stdout.write(f"stored in {add(name_of(device), fastest)}\n")
    return 0


def formatted(candidate: Candidate) -> str:
    """Format a candidate; those of several kernels are joined by semicolons."""
    if isinstance(candidate[0], tuple):
        return "; ".join(map(formatted, candidate))  # type: ignore[arg-type]
    return " ".join(map(str, candidate))


if __name__ == "__main__":
    raise SystemExit(main())

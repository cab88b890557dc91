"""What stays out of graphs of `torch.compile`, so that it draws and drops there what it does elsewhere."""

from __future__ import annotations

import torch

from attn_variants import dropping
from attn_variants.compute import plain

drawn = torch.compiler.disable(dropping.drawn)  # type: ignore[no-untyped-call]
# Fused into what reads it, every round of random numbers would be written out anew for each use of the one before.
kept = torch.compiler.disable(plain.kept)  # type: ignore[no-untyped-call]

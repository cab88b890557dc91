"""Functions that stay out of graphs of `torch.compile`, so that they give what they give elsewhere.

They are in a module of their own because `torch.compiler.disable` loads dynamo, which only compiling processes need.
"""

from __future__ import annotations

import torch

from attn_variants.compute import dropout

new_dropout = torch.compiler.disable(dropout.new_dropout)  # type: ignore[no-untyped-call]
# In a graph, every round of random numbers would be computed anew for each use of the one before.
kept_weights = torch.compiler.disable(dropout.kept_weights)  # type: ignore[no-untyped-call]

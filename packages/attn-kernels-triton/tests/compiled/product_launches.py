"""Launches of products with weights of few bits as models would cause them, over tensors that are never touched."""

from __future__ import annotations

import torch
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.products import Held, linear_launches
from attn_kernels_triton.stored_blocks import stored_linear
from attn_models.weights.block_layouts import GGUF_LAYOUTS, INT4_ZEROS

WIDTH = 4096
DECODED, PROMPTED = 16, 512
"""Rows of a step of decoding, and of a prompt."""


def held(form: str, inputs: int = WIDTH, outputs: int = WIDTH) -> Held:
    """Weights of a form, with a bias; in blocks of a file those that lie there, as they are taken apart."""

    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.empty(outputs, *shape, dtype=dtype)

    bias, groups = empty(dtype=torch.float32), inputs // 32
    match form:
        case "int8":
            codes, steps = empty(inputs, dtype=torch.int8), empty(dtype=torch.float32)
            return Held(codes, steps, None, None, bias, inputs, 8, None)
        case "int4":
            codes = empty(inputs // 2, dtype=torch.uint8)
            return Held(codes, empty(groups), empty(groups), None, bias, inputs, 4, 32)
    layout = GGUF_LAYOUTS.get(form.upper(), INT4_ZEROS)
    blocks = torch.zeros(outputs, inputs // layout.inputs * layout.nbytes, dtype=torch.uint8)
    return stored_linear(form, blocks, bias).held


def product_launches(form: str, count: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The programs over so many rows."""
    rows, out = torch.empty(count, WIDTH, dtype=dtype), torch.empty(count, WIDTH, dtype=dtype)
    return linear_launches(rows, held(form), out)

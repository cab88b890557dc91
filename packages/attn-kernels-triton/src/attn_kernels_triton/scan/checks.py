"""What is refused of a linear recurrence before anything is launched."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import Decay, Steps
from torch import Tensor

from attn_kernels_triton.attention.checks import check_count, check_like
from attn_kernels_triton.backends.recurrence import WIDEST, WIDEST_APART
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.scan.tiles import CHUNKS

SCAN_DTYPES = (torch.float32, torch.bfloat16)


def check_steps(steps: Steps, before: Tensor | None) -> None:
    """Raise `InvalidValue` for steps that the programs would misread, overrun or compute in the wrong type."""
    check_key(steps.key, steps.fades)
    batch, tokens, heads, size = steps.key.shape
    width = steps.value.shape[-1]
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "query": (steps.query, (batch, tokens, heads, size)),
        "value": (steps.value, (batch, tokens, heads, width)),
        "strength": (steps.strength, (batch, tokens, heads)),
        "before": (before, (batch, heads, size, width)),
    }
    if steps.decay is not None:
        sequences, channels = steps.decay.shape[0], steps.decay.shape[-1]
        allowed = (batch if sequences == batch else 1, tokens, heads, size if channels != 1 else 1)
        expected["decay"] = steps.decay, allowed
    for name, (part, shape) in expected.items():
        if part is None:
            continue
        check_like(name, part, shape, steps.key.device)
        wide = name in {"strength", "before", "decay"}
        if part.dtype != steps.key.dtype and not (wide and part.dtype == torch.float32):
            kinds = f"{steps.key.dtype}, as the keys" + (", or float32" if wide else "")
            raise InvalidValue.of(f"{name}.dtype", str(part.dtype), kinds)
    check_count("elements of the memories of a head", (tokens // 16 + 1) * size * width)
    # What programs write lies dense, in rows of 64 at least.
    check_count("elements of a sequence", tokens * heads * max(size, width, *CHUNKS.values()))
    for name, rows in (("query", steps.query), ("key", steps.key), ("value", steps.value)):
        check_count(f"{name}: elements from the first to the last row of a head", tokens * rows.stride(1))


def check_key(key: Tensor, fades: Decay) -> None:
    """Keys [batch, token, head, size] on a GPU, of a type and size that the programs take."""
    if key.dim() != 4:
        raise InvalidValue.of("key", list(key.shape), "four axes: batch, token, head, size")
    if key.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("key.device", str(key.device), "a GPU: these kernels do not run on a CPU")
    if key.dtype not in SCAN_DTYPES:
        raise InvalidValue.of("key.dtype", str(key.dtype), "float32 or bfloat16")
    apart = fades == "channel" or key.dtype == torch.float32
    widest = WIDEST_APART if apart else WIDEST
    if key.shape[3] > widest:
        raise InvalidValue.of("key", list(key.shape), f"a size of at most {widest} with these types and decays")

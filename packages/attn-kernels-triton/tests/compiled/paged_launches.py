"""Launches over pages as a step of an engine would cause them."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec, Causal, Heads, Mask, RaggedBatch
from attn_core.batch import RowsInPlace, StaticBatch, StaticRows
from attn_core.distributions import Softmax
from attn_core.kernels.attend import PagedAttentionInputs
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.paged import step
from attn_kernels_triton.paged.attend import launches
from attn_kernels_triton.paged.step import WorkLists, bucket_of

CONTEXTS = (700, 5, 300)
POOL = 4096
CAUSAL = Causal()


def paged_launches(
    size: int,
    *,
    form: str = "plain",
    heads: tuple[int, int] = (32, 8),
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] = (1, 1, 200),
    mask: Mask = CAUSAL,
    tree: bool = False,
    **parts,
) -> list[Launch]:
    """The programs of a step that decodes and computes a chunk of a prompt, or of a `tree`; where `form` is latent, of
    MLA."""
    query, shared = heads
    latent = form == "latent"
    sizes = (size + 64, size) if latent else (size, size)
    counts = Heads(query=query, key_value=shared, key_size=sizes[0], value_size=sizes[1])
    spec = AttentionSpec(heads=counts, mask=mask, **{"distribution": Softmax(), **parts})
    batch = RaggedBatch.of(lengths, CONTEXTS, torch.tensor)
    width = max(length + context for length, context in zip(lengths, CONTEXTS, strict=True))
    numbers = torch.zeros(len(lengths), width, dtype=torch.int64)
    if tree:
        lengths = (1, 1, 1)
        batch = RaggedBatch.of(lengths, (700, 701, 701), torch.tensor, [(700,), (700, 701), (700, 702)])
        numbers = torch.arange(702).repeat(3, 1)
        numbers[2, 701] = 702
    known = "plain" if latent else form
    operands = PagedAttentionInputs(
        query=torch.empty(sum(lengths), query, sizes[0], dtype=dtype),
        batch=batch,
        rows=RowsInPlace(fields_of(form, shared, size, dtype), numbers, numbers, (0, 0, 0), known),
        requests=(0, 1, 2),
        parameters={name: torch.zeros(shape) for name, shape in spec.weights.items()},
    )
    return launches(spec, operands, torch.empty(sum(lengths), query, sizes[1], dtype=dtype))


def fields_of(form: str, heads: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Memory of keys and values in this form."""
    if form == "latent":
        return {"latent": torch.empty(POOL, size, dtype=dtype), "rotary_key": torch.empty(POOL, 64, dtype=dtype)}
    half = {"dtype": torch.float16}
    found = {}
    for name in ("key", "value"):
        if form == "plain":
            found[name] = torch.empty(POOL, heads, size, dtype=dtype)
        elif form == "int8":
            found[f"{name}.codes"] = torch.empty(POOL, heads, size, dtype=torch.int8)
            found[f"{name}.scale"] = torch.empty(POOL, heads, **half)
        else:
            found[f"{name}.codes"] = torch.empty(POOL, heads, size // 2, dtype=torch.uint8)
            for part in ("step", "low"):
                found[f"{name}.{part}"] = torch.empty(POOL, heads, size // 32, **half)
    return found


def step_launches(
    size: int,
    *,
    form: str = "plain",
    heads: tuple[int, int] = (32, 8),
    requests: int = 257,
    tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    mask: Mask = CAUSAL,
    **parts,
) -> list[Launch]:
    """The programs of a recorded step of up to so many tokens: what cuts it, and what attends and merges. There is one
    request less than `requests`, the last being the padding; as many as `tokens` decode."""
    query, shared = heads
    sizes = (size + 64, size) if form == "latent" else (size, size)
    counts = Heads(query=query, key_value=shared, key_size=sizes[0], value_size=sizes[1])
    spec = AttentionSpec(heads=counts, mask=mask, **{"distribution": Softmax(), **parts})
    places, longest = torch.zeros(tokens, dtype=torch.int64), 1 if tokens < requests else tokens
    rows = StaticRows(
        fields_of(form, shared, size, dtype),
        places,
        torch.zeros(requests - 1, 256, dtype=torch.int32),
        (),
        "plain" if form == "latent" else form,
        block_size=16,
        contexts=torch.zeros(requests, dtype=torch.int64),
        query_starts=torch.zeros(requests + 1, dtype=torch.int64),
        max_query_len=longest,
    )
    operands = PagedAttentionInputs(
        query=torch.empty(tokens, query, sizes[0], dtype=dtype),
        batch=StaticBatch(places, 4096, longest),
        rows=rows,
        requests=(),
        parameters={name: torch.zeros(shape) for name, shape in spec.weights.items()},
    )
    work = WorkLists.of(bucket_of(spec, operands.query, rows), torch.device("cpu"))
    out = torch.empty(tokens, query, sizes[1], dtype=dtype)
    return [work.layout(rows.query_starts, rows.contexts), *step.launches(spec, operands, rows, work, out)]


def decode_launches(size: int, requests: int = 64, **shape) -> list[Launch]:
    """The programs of a recorded step of one token of each request."""
    return step_launches(size, tokens=requests, requests=requests + 1, **shape)

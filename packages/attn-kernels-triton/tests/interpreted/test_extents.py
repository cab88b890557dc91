"""What 32 bits cannot count is refused before programs start, or counted in 64; tensors here hold almost nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, RaggedBatch, Window
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.kernels.recurrence import Steps
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.paged.attend import attend_rows
from attn_kernels_triton.recurrence.compute import by_chunks, by_token
from attn_testing import oracle

FAR = 2**31
HALF, BRAIN = torch.float16, torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = BRAIN) -> torch.Tensor:
    """Rows all of which are one, dense along the last axis."""
    return torch.zeros(shape[-1], dtype=dtype).as_strided(shape, (*(0,) * (len(shape) - 1), 1))


def reserved(count: int) -> torch.Tensor:
    """Numbers whose memory is only reserved: pages that nobody touches take none."""
    return torch.empty(2 * count, dtype=torch.int8).view(HALF)


def asked(size: int, value_size: int = 0, heads: int = 1, **parts) -> AttentionSpec:
    """Causal attention of so many heads."""
    counts = Heads(query=heads, key_value=heads, key_size=size, value_size=value_size or size)
    return AttentionSpec(heads=counts, **{"mask": Causal(), **parts})


def test_gradients_that_would_be_longer_than_32_bits_count_are_refused_however_little_operands_hold():
    key = rows(1, FAR // 16 + 1, 1, 16)
    with pytest.raises(InvalidValue, match=r"^key: elements"):
        attend(asked(16), AttentionInputs(query=rows(1, 4, 1, 16), key=key, value=key))


def test_an_output_that_is_longer_than_the_queries_is_counted_too():
    query, value = rows(1, FAR // (16 * 256) + 1, 16, 16), rows(1, 4, 16, 256)
    with pytest.raises(InvalidValue, match=r"^output"):
        attend(asked(16, 256, 16), AttentionInputs(query=query, key=rows(1, 4, 16, 16), value=value))


def test_a_gradient_to_the_output_whose_rows_lie_very_far_apart_is_read_right():
    query, key, value = (torch.randn(1, 3, 1, 16).to(HALF).requires_grad_() for _ in range(3))
    out = attend(asked(16), AttentionInputs(query=query, key=key, value=value))
    near = torch.randn(1, 3, 1, 16).to(HALF)
    far = reserved(FAR + 16).as_strided((1, 3, 1, 16), (0, 2**30, 0, 1)).copy_(near)
    first, second = (torch.autograd.grad(out, (query, key, value), change, retain_graph=True) for change in (near, far))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("mask", [Window(left=2**40), Window(left=None, right=FAR - 1), Window(left=FAR, right=FAR)])
def test_windows_wider_than_32_bits_count_see_what_is_there(mask):
    operands = AttentionInputs(**{name: torch.randn(1, 40, 1, 16) for name in ("query", "key", "value")})
    exact = oracle.attend(asked(16, mask=mask), operands)
    assert torch.allclose(attend(asked(16, mask=mask), operands), exact, atol=1e-5)


@pytest.mark.parametrize("name", ["query_positions", "key_positions"])
def test_positions_that_32_bits_cannot_tell_apart_are_refused(name):
    given = {part: torch.zeros(1, 4, 1, 16) for part in ("query", "key", "value")}
    with pytest.raises(InvalidValue, match=f"^{name}.*{2**32}"):
        attend(asked(16), AttentionInputs(**given, **{name: torch.tensor([[0, 1, 2, 2**32]])}))


def paged(
    fields: dict[str, torch.Tensor], numbers: torch.Tensor, context: int = 0, form: str = "plain"
) -> PagedAttentionInputs:
    """A token of one request after so many others."""
    return PagedAttentionInputs(
        query=torch.randn(1, 3, 16, dtype=HALF),
        batch=RaggedBatch.of((1,), (context,), torch.tensor),
        rows=RowsInPlace(fields, numbers, numbers, (0,), form),
        requests=(0,),
    )


@pytest.mark.parametrize("outermost", ["rows", "heads"])
def test_memory_of_more_elements_than_32_bits_count_is_read_where_it_lies(outermost):
    # The last row, or the last head, begins behind the first 2^31 elements.
    held = FAR // 48 + 2
    shape, strides = (held, 3, 16), (48, 16, 1) if outermost == "rows" else (16, 2**30, 1)
    numbers = torch.tensor([[held - 1, 0, held - 2]])
    fields = {}
    for name in ("key", "value"):
        fields[name] = reserved(2 * FAR).as_strided(shape, strides)
        fields[name][numbers[0]] = torch.randn(3, 3, 16).to(HALF)
    operands = paged(fields, numbers, context=2)
    near = {name: field[numbers[0]] for name, field in fields.items()}
    alone = dataclasses.replace(operands.rows, fields=near, kv_indices=torch.arange(3)[None])
    expected = attend_rows(asked(16, heads=3), dataclasses.replace(operands, rows=alone))
    assert torch.equal(attend_rows(asked(16, heads=3), operands), expected)


def test_numbers_of_rows_that_are_not_counted_in_64_bits_are_refused():
    fields = {name: rows(4, 3, 16, dtype=HALF) for name in ("key", "value")}
    with pytest.raises(InvalidValue, match=r"^rows\.kv_indices\.dtype"):
        attend_rows(asked(16, heads=3), paged(fields, torch.zeros(1, 1, dtype=torch.int32)))


def test_requests_longer_than_32_bits_count_are_refused():
    fields = {name: rows(4, 3, 16, dtype=HALF) for name in ("key", "value")}
    with pytest.raises(InvalidValue, match=r"^contexts"):
        attend_rows(asked(16, heads=3), paged(fields, torch.zeros(1, 1).long().expand(1, FAR), FAR - 1))


@pytest.mark.parametrize("compute", [by_chunks, by_token])
def test_recurrences_longer_than_32_bits_count_are_refused(compute):
    tokens = FAR // 64
    key, value = rows(1, tokens, 1, 16), rows(1, tokens, 1, 1)
    with pytest.raises(InvalidValue, match=r"^elements of a sequence"):
        compute(Steps(key, key, value), None)


def test_steps_whose_rows_lie_very_far_apart_are_read_right():
    query, key, value, decay = (torch.rand(1, 3, 1, size).to(HALF).float() for size in (16, 16, 4, 16))
    near = Steps(query, key, value, -decay)
    far = reserved(2 * FAR + 32).view(torch.float32).as_strided((1, 3, 1, 16), (0, 2**30, 0, 1)).copy_(-decay)
    assert torch.equal(by_token(near, None)[0], by_token(near._replace(decay=far), None)[0])

"""The trials of the tuner: launches of every candidate for attention, paged decoding and recurrences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask, RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.kernels.attend import PagedAttentionInputs

from attn_kernels_triton.attention.backward import Backwards, dense_launches
from attn_kernels_triton.attention.forward import Inputs, empty, forward_launch, launch_of
from attn_kernels_triton.attention.plan import Plan, plan_of
from attn_kernels_triton.attention.tiles import dense_choice, no_larger
from attn_kernels_triton.kernels.recurrence_backward import unrecall, unremember
from attn_kernels_triton.kernels.recurrence_forward import recall, remember
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.paged.attend import launches
from attn_kernels_triton.recurrence.launch import (
    Buffers,
    Given,
    Gradients,
    buffers_of,
    gradients,
    recurrence_launch,
    scan_of,
    spaced,
    unscan_of,
)
from attn_kernels_triton.recurrence.tiles import ScanChoice, scan_choice
from attn_kernels_triton.tuning.candidates import (
    BACKWARD,
    CANDIDATES,
    LONG,
    PAGED,
    RECURRENCES,
    Candidate,
    kind_of,
    paged_name,
    recurrence_name,
)


class Trial(NamedTuple):
    """The name of a kind of call, a candidate for it, and the launches to be timed."""

    name: str
    candidate: Candidate
    launches: tuple[Launch, ...]


MASKS: tuple[Mask, ...] = (Full(), Causal())
LENGTHS = (LONG // 2, 2 * LONG)
HEADS = 16


def attention_count() -> int:
    """The number of trials of attention, forward and backward."""
    return sum(map(len, (*CANDIDATES.values(), *BACKWARD.values()))) * len(MASKS) * len(LENGTHS)


def forward_trials(device: torch.device) -> Iterator[Trial]:
    """The trials of the forward kernels."""
    for plan, inputs in calls(CANDIDATES, device):
        kind = kind_of(plan.sizes, plan.rule)
        for candidate in CANDIDATES[kind.width]:
            launch = launch_of(plan, inputs, empty(plan, inputs), dense_choice(plan.sizes, candidate, pairs=True))
            yield Trial(kind.name, candidate, (launch,))


def backward_trials(device: torch.device) -> Iterator[Trial]:
    """The trials of the backward kernels; all kernels of a candidate are timed together."""
    for plan, inputs in calls(BACKWARD, device):
        kind = kind_of(plan.sizes, plan.rule)
        result = empty(plan, inputs)
        forward_launch(plan, inputs, result).run(device)
        found = Inputs(*map(torch.empty_like, inputs))
        work = Backwards(inputs, result, torch.randn_like(result.out), torch.empty_like(result.lse), found)
        for candidate in BACKWARD[kind.width]:
            choices = tuple(no_larger(choice, plan.sizes) for choice in candidate)
            yield Trial(kind.backward, candidate, tuple(dense_launches(plan, work, choices)))


def calls(widths: Iterable[int], device: torch.device) -> Iterator[tuple[Plan, Inputs]]:
    """Plans and random inputs for every width, length and mask."""
    for width in widths:
        heads = Heads(query=HEADS, key_value=HEADS, key_size=width, value_size=width)
        for length in LENGTHS:
            inputs = Inputs(*torch.randn(3, 1, length, HEADS, width, device=device).bfloat16())
            operands = AttentionInputs(query=inputs.query, key=inputs.key, value=inputs.value)
            for mask in MASKS:
                yield plan_of(AttentionSpec(heads=heads, mask=mask), operands), inputs


REQUESTS, CONTEXT = 16, 8191


class Shape(NamedTuple):
    """Numbers of query and key/value heads, and sizes of keys and values; if `latent`, all heads share one latent."""

    query: int
    shared: int
    key: int
    value: int
    latent: bool = False


SHAPES = {
    64: Shape(32, 8, 64, 64),
    128: Shape(32, 8, 128, 128),
    256: Shape(16, 4, 256, 256),
    512: Shape(16, 1, 576, 512, latent=True),
}
"""The shapes of the decode trials, by width."""


def paged_count() -> int:
    """The number of trials of paged decoding."""
    return sum(map(len, PAGED.values()))


def paged_trials(device: torch.device) -> Iterator[Trial]:
    """The trials of paged decoding: a step in which every request decodes one token."""
    for width, candidates in PAGED.items():
        spec, operands = call(SHAPES[width], device)
        out = operands.query.new_empty(REQUESTS, spec.heads.query, spec.heads.value_size)
        for candidate in candidates:
            yield Trial(paged_name(width), candidate, tuple(launches(spec, operands, out, candidate)))


def call(shape: Shape, device: torch.device) -> tuple[AttentionSpec, PagedAttentionInputs]:
    """A spec and random operands of a decode step, with the rows of each request scattered over the cache."""
    held = CONTEXT + 1
    pool = REQUESTS * held

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    fields = {"key": rows(pool, shape.shared, shape.key), "value": rows(pool, shape.shared, shape.value)}
    if shape.latent:
        fields = {"latent": rows(pool, shape.value), "rotary_key": rows(pool, shape.key - shape.value)}
    numbers = torch.randperm(pool, device=device).view(REQUESTS, held)
    operands = PagedAttentionInputs(
        query=rows(REQUESTS, shape.query, shape.key),
        batch=RaggedBatch.of((1,) * REQUESTS, (CONTEXT,) * REQUESTS, lambda given: torch.tensor(given, device=device)),
        rows=RowsInPlace(fields, numbers, numbers, (0,) * REQUESTS, "plain"),
        requests=tuple(range(REQUESTS)),
        parameters={},
    )
    heads = Heads(query=shape.query, key_value=shape.shared, key_size=shape.key, value_size=shape.value)
    return AttentionSpec(heads=heads, mask=Causal()), operands


BATCH, TOKENS, RECURRENT_HEADS, SIZE = 4, 4096, 16, 128

PROGRAMS: dict[str, Any] = {program.__name__: program for program in (remember, recall, unrecall, unremember)}


def recurrence_count() -> int:
    """The number of trials of recurrences."""
    return sum(map(len, RECURRENCES.values()))


def recurrence_trials(device: torch.device) -> Iterator[Trial]:
    """The trials of the chunked kernels of the gated delta rule, with one decay per head and per channel."""
    for channels in (False, True):
        given = steps(device, channels=channels)
        work = buffers_of(given)
        solved = work.solved_values, work.solved_keys, work.inverse
        for part in (work.decay_sums, *solved, work.new_values, work.chunk_states):
            if part is not None:
                part.zero_()
        found = gradients(given, torch.randn_like(work.out), work.after, decays=True)
        found.chunk_states.zero_()
        found.new_values.zero_()
        for (program, apart), candidates in RECURRENCES.items():
            if apart == channels:
                for candidate in candidates:
                    launch = trial_launch(program, (given, work, found), candidate)
                    yield Trial(recurrence_name(program, channels=channels), candidate, (launch,))


def trial_launch(program: str, tensors: tuple[Given, Buffers, Gradients], candidate: ScanChoice) -> Launch:
    """The launch of one recurrence kernel, with a tile of no more channels than there are."""
    given, work, found = tensors
    choice = scan_choice(program, given.sizes, candidate)
    if program in {"remember", "recall"}:
        return recurrence_launch(PROGRAMS[program], scan_of(given, work, choice), given, choice)
    return recurrence_launch(PROGRAMS[program], unscan_of(given, work, found, choice), given, choice)


def steps(device: torch.device, *, channels: bool) -> Given:
    """Random steps in bfloat16 with weak decay."""
    rows = torch.randn(3, BATCH, TOKENS, RECURRENT_HEADS, SIZE, device=device).bfloat16()
    decay = -0.01 * torch.rand(BATCH, TOKENS, RECURRENT_HEADS, SIZE if channels else 1, device=device)
    strength = spaced(torch.rand(BATCH, TOKENS, RECURRENT_HEADS, 1, device=device))
    return Given(rows[0], rows[1], rows[2], decay, strength, None)


def trials(device: torch.device) -> Iterator[Trial]:
    """All trials, created one at a time."""
    for source in (forward_trials, backward_trials, paged_trials, recurrence_trials):
        yield from source(device)


def count() -> int:
    """The number of all trials."""
    return attention_count() + paged_count() + recurrence_count()

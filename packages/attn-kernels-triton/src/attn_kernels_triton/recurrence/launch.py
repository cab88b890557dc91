"""Buffers and launches of the recurrence kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attn_kernels_triton.kernels.arguments import NO_ROWS, Rows
from attn_kernels_triton.kernels.recurrence import DecaySums, Decode, Scan, Unscan, sum_decays
from attn_kernels_triton.kernels.recurrence_backward import gradient_to_channels, uncorrect, unrecall, unremember
from attn_kernels_triton.kernels.recurrence_forward import correct, go_through, recall, remember
from attn_kernels_triton.launch import Launch, addressable, laid_like, power_of_two
from attn_kernels_triton.recurrence.tiles import (
    DECAY_CHANNELS,
    DECODE_WARPS,
    DECODED,
    NARROWEST,
    ScanChoice,
    ScanSizes,
    scan_choice,
    scan_tile,
)
from attn_kernels_triton.tuning.candidates import recurrence_name
from attn_kernels_triton.tuning.store import known


class Given(NamedTuple):
    """Steps and the initial state, every last axis contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    strength: Tensor | None
    before: Tensor | None

    @property
    def sizes(self) -> ScanSizes:
        """The sizes and dtype of the steps."""
        channels = self.decay is not None and self.decay.shape[-1] > 1
        return ScanSizes(self.key.dtype, self.key.shape[3], self.value.shape[3], self.key.shape[1], channels)

    def rows(self, size: int) -> Tensor:
        """An empty tensor [batch, tokens, heads, size] in the dtype of the steps."""
        return torch.empty(*self.key.shape[:3], size, dtype=self.key.dtype, device=self.key.device)

    def state(self) -> Tensor:
        """An empty state [batch, heads, key_size, value_size], float32."""
        batch, _, heads, size = self.key.shape
        return torch.empty(batch, heads, size, self.value.shape[3], dtype=torch.float32, device=self.key.device)

    def chunk_states(self) -> Tensor:
        """An empty tensor for the states of all chunks [batch, heads, chunks · key_size, value_size] in the dtype of
        the steps."""
        batch, tokens, heads, size = self.key.shape
        cells = -(-tokens // self.sizes.chunk) * size
        return torch.empty(batch, heads, cells, self.value.shape[3], dtype=self.key.dtype, device=self.key.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """The intermediate buffers of the kernels and the results; see `kernels.recurrence.Scan`."""

    decay_sums: Tensor | None
    solved_values: Tensor | None
    solved_keys: Tensor | None
    inverse: Tensor | None
    new_values: Tensor | None
    chunk_states: Tensor
    after: Tensor
    out: Tensor


def buffers_of(given: Given) -> Buffers:
    """Allocate the intermediate buffers and the results."""
    delta_rule, sizes = given.strength is not None, given.sizes
    decay_sums = None
    if given.decay is not None:
        decay_sums = torch.empty_like(given.decay, dtype=torch.float32, memory_format=torch.contiguous_format)
        decay_sums = decay_sums if sizes.channels else spaced(decay_sums)
    return Buffers(
        decay_sums=decay_sums,
        solved_values=given.rows(sizes.value_size) if delta_rule else None,
        solved_keys=given.rows(sizes.key_size) if delta_rule else None,
        inverse=given.rows(sizes.chunk) if delta_rule else None,
        new_values=given.rows(sizes.value_size) if delta_rule else None,
        chunk_states=given.chunk_states(),
        after=given.state(),
        out=given.rows(sizes.value_size),
    )


def token_view(tensor: Tensor | None) -> Rows:
    """The kernel argument for a tensor [batch or 1, token, head, size]; `NO_ROWS` for None."""
    if tensor is None:
        return NO_ROWS
    batch, row, head = tensor.stride()[:3]
    return Rows(tensor, 0 if tensor.shape[0] == 1 else batch, row, head)


def channel_view(tensor: Tensor | None) -> Rows:
    """The kernel argument for a tensor [batch, head, channel, size]; `NO_ROWS` for None."""
    if tensor is None:
        return NO_ROWS
    batch, head, row, _ = tensor.stride()
    return Rows(tensor, batch, row, head)


def spaced(tensor: Tensor) -> Tensor:
    """A copy of a tensor [batch, tokens, heads, 1] with a head stride of two elements.

    Triton turns a stride of 1 into a constant, and Triton 3.6 loses constants of tuples inside loops.
    """
    wide = tensor.new_empty(*tensor.shape[:3], 2)
    wide[..., :1] = tensor
    return wide[..., :1]


def chosen_scan(program: str, given: Given) -> ScanChoice:
    """The launch parameters of a chunked kernel: measured, else the default; only 16-bit elements and keys of at most
    128 channels are tuned."""
    found, sizes = None, given.sizes
    if sizes.dtype.itemsize == 2 and sizes.key_size <= NARROWEST:
        found = known(ScanChoice, recurrence_name(program, channels=sizes.channels), given.key.device)
    return scan_choice(program, sizes, found)


def state_launches(given: Given, work: Buffers) -> list[Launch]:
    """The launches that both passes begin with: sums of decays, delta-rule corrections, and states before every
    chunk."""
    found = []
    if given.decay is not None and work.decay_sums is not None:
        found.append(decay_launch(given.decay, work.decay_sums, given.sizes))
    if given.strength is not None:
        found.append(scan_launch(correct, given, work, chosen_scan("correct", given)))
    return [*found, scan_launch(remember, given, work, chosen_scan("remember", given))]


def forward_launches(given: Given, work: Buffers) -> list[Launch]:
    """The launches of the forward pass in order."""
    return [*state_launches(given, work), scan_launch(recall, given, work, chosen_scan("recall", given))]


def scan_launch(program: Any, given: Given, work: Buffers, choice: ScanChoice) -> Launch:
    """The launch of a kernel with a `Scan` argument."""
    return recurrence_launch(program, scan_of(given, work, choice), given, choice)


def recurrence_launch(program: Any, call: Any, given: Given, choice: ScanChoice) -> Launch:
    """The launch of a kernel with an argument and launch parameters."""
    programs = count(program.__name__, given, choice)
    return Launch(program=program, programs=programs, call=call, warps=choice.warps, stages=choice.stages)


def count(program: str, given: Given, choice: ScanChoice) -> int:
    """The grid size of a kernel: for each head, the number of chunks, of parts of values or keys, or their product."""
    sizes = given.sizes
    chunks = -(-sizes.tokens // sizes.chunk)
    values, keys = -(-sizes.value_size // choice.values), -(-sizes.key_size // choice.keys)
    each = {"correct": chunks, "uncorrect": chunks, "remember": values, "unremember": values}
    each |= {"recall": chunks * values, "unrecall": chunks * values, "gradient_to_channels": chunks * keys}
    return given.key.shape[0] * given.key.shape[2] * each[program]


def scan_of(given: Given, work: Buffers, choice: ScanChoice) -> Scan:
    """The argument of the forward kernels."""
    return Scan(
        query=token_view(given.query),
        key=token_view(given.key),
        value=token_view(given.value),
        decay_sums=token_view(work.decay_sums),
        strength=token_view(given.strength),
        solved_values=token_view(work.solved_values),
        solved_keys=token_view(work.solved_keys),
        inverse=token_view(work.inverse),
        new_values=token_view(given.value if work.new_values is None else work.new_values),
        chunk_states=channel_view(work.chunk_states),
        before=channel_view(given.before),
        after=channel_view(work.after),
        out=token_view(work.out),
        heads=given.key.shape[2],
        tokens=given.key.shape[1],
        tile=scan_tile(choice, given.sizes),
    )


def decay_launch(decay: Tensor, decay_sums: Tensor, sizes: ScanSizes) -> Launch:
    """The launch of the kernel that sums decays."""
    batch, tokens, heads, size = decay.shape
    channels = 1 if size == 1 else min(DECAY_CHANNELS, power_of_two(size))
    constants = map(tl.constexpr, (sizes.chunk, size, channels))
    call = DecaySums(token_view(decay), token_view(decay_sums), heads, tokens, *constants)
    programs = batch * heads * -(-tokens // sizes.chunk) * -(-size // channels)
    return Launch(program=sum_decays, programs=programs, call=call, warps=4, stages=1)


def decode_launch(given: Given, out: Tensor, after: Tensor) -> Launch:
    """The launch of the token-by-token kernel."""
    choice = ScanChoice(DECODED, DECODED, DECODE_WARPS, 1)
    batch, tokens, heads, _ = given.key.shape
    call = Decode(
        query=token_view(given.query),
        key=token_view(given.key),
        value=token_view(given.value),
        decay=token_view(given.decay if given.decay is None or given.sizes.channels else spaced(given.decay)),
        strength=token_view(given.strength),
        before=channel_view(given.before),
        after=channel_view(after),
        out=token_view(out),
        heads=heads,
        tokens=tokens,
        tile=scan_tile(choice, given.sizes),
    )
    programs = batch * heads * -(-given.sizes.value_size // DECODED)
    return Launch(program=go_through, programs=programs, call=call, warps=choice.warps, stages=choice.stages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """The gradients that the backward kernels read and write; see `kernels.recurrence.Unscan`.

    With the delta rule `new_values` is the gradient of what is written to the state and `value` that of the values;
    without it they are the same tensor.
    """

    out: Tensor
    after: Tensor | None
    chunk_states: Tensor
    new_values: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    strength: Tensor | None
    before: Tensor | None


def gradients(given: Given, out: Tensor, after: Tensor | None, *, decays: bool) -> Gradients:
    """Allocate the gradients; `decays` is whether those of log decays are needed."""
    sizes, strength = given.sizes, given.strength
    new_values = given.rows(sizes.value_size)
    parts = sizes.key_size
    if not sizes.channels:
        parts = -(-sizes.key_size // chosen_scan("gradient_to_channels", given).keys)
    return Gradients(
        out=addressable(out),
        after=None if after is None else addressable(after),
        chunk_states=given.chunk_states(),
        new_values=new_values,
        query=given.rows(sizes.key_size),
        key=given.rows(sizes.key_size),
        value=new_values if strength is None else given.rows(sizes.value_size),
        decay=given.key.new_empty(*given.key.shape[:3], parts, dtype=torch.float32) if decays else None,
        strength=None if strength is None else torch.empty_like(strength, dtype=torch.float32),
        before=None if given.before is None else given.state(),
    )


def backward_launches(given: Given, work: Buffers, found: Gradients) -> list[Launch]:
    """The launches of the backward pass in order; the states are recomputed first."""
    programs = [unrecall, unremember, *([] if given.strength is None else [uncorrect]), gradient_to_channels]
    launches = state_launches(given, work)
    for program in programs:
        choice = chosen_scan(program.__name__, given)
        launches.append(recurrence_launch(program, unscan_of(given, work, found, choice), given, choice))
    return launches


def unscan_of(given: Given, work: Buffers, found: Gradients, choice: ScanChoice) -> Unscan:
    """The argument of the backward kernels."""
    return Unscan(
        scan=scan_of(given, work, choice),
        out=token_view(found.out),
        after=channel_view(found.after),
        chunk_states=channel_view(found.chunk_states),
        new_values=token_view(found.new_values),
        before=channel_view(found.before),
        query=token_view(found.query),
        key=token_view(found.key),
        value=token_view(found.value),
        decay=token_view(found.decay),
        strength=token_view(found.strength),
    )


def run_backward(given: Given, out: Tensor, after: Tensor | None, work: Buffers, *, decays: bool) -> Gradients:
    """Run the backward kernels, given the gradients of the output and of the final state (None for none)."""
    out, after = laid_like(out, work.out), None if after is None else laid_like(after, work.after)
    found = gradients(given, out, after, decays=decays)
    for launch in backward_launches(given, work, found):
        launch.run(out.device)
    return found

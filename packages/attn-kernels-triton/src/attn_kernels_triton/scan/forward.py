"""Launching the forward programs of a recurrence."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from attn_kernels_triton.kernels.scan.arguments import Decode, Fade, Scan
from attn_kernels_triton.kernels.scan.correct import correct
from attn_kernels_triton.kernels.scan.decode import go_through
from attn_kernels_triton.kernels.scan.forward import recall, remember
from attn_kernels_triton.kernels.scan.rows import sum_decays
from attn_kernels_triton.launch import Launch, power_of_two
from attn_kernels_triton.scan.tiles import DECODE_WARPS, DECODED, FADED, ScanChoice, ScanSizes, scan_tile
from attn_kernels_triton.scan.work import Between, Given, by_channel, by_token, spaced
from attn_kernels_triton.tuning.chosen import chosen_scan


def memory_launches(given: Given, work: Between) -> list[Launch]:
    """What must be known before anything is read, or any gradient computed: sums of decays, corrections, memories."""
    found = []
    if given.decay is not None and work.faded is not None:
        found.append(fade_launch(given.decay, work.faded, given.sizes))
    if given.strength is not None:
        found.append(scan_launch(correct, given, work, chosen_scan("correct", given)))
    return [*found, scan_launch(remember, given, work, chosen_scan("remember", given))]


def forward_launches(given: Given, work: Between) -> list[Launch]:
    """The programs in the order in which they run."""
    return [*memory_launches(given, work), scan_launch(recall, given, work, chosen_scan("recall", given))]


def scan_launch(program: Any, given: Given, work: Between, choice: ScanChoice) -> Launch:
    """One of the programs that are given a `Scan`."""
    return launch_of(program, scan_of(given, work, choice), given, choice)


def launch_of(program: Any, call: Any, given: Given, choice: ScanChoice) -> Launch:
    """A program with what it is given, as often as its choice asks for."""
    programs = count(program.__name__, given, choice)
    return Launch(program=program, programs=programs, call=call, warps=choice.warps, stages=choice.stages)


def count(program: str, given: Given, choice: ScanChoice) -> int:
    """How many programs there are of one: for each head, of chunks, or of parts of values or keys, or of both."""
    sizes = given.sizes
    chunks = -(-sizes.tokens // sizes.chunk)
    values, keys = -(-sizes.value_size // choice.values), -(-sizes.key_size // choice.keys)
    each = {"correct": chunks, "uncorrect": chunks, "remember": values, "unremember": values}
    each |= {"recall": chunks * values, "unrecall": chunks * values, "gradient_to_channels": chunks * keys}
    return given.key.shape[0] * given.key.shape[2] * each[program]


def scan_of(given: Given, work: Between, choice: ScanChoice) -> Scan:
    """What the programs have in common."""
    return Scan(
        query=by_token(given.query),
        key=by_token(given.key),
        value=by_token(given.value),
        faded=by_token(work.faded),
        strength=by_token(given.strength),
        solved=by_token(work.solved),
        told=by_token(work.told),
        inverse=by_token(work.inverse),
        news=by_token(given.value if work.news is None else work.news),
        states=by_channel(work.states),
        before=by_channel(given.before),
        after=by_channel(work.after),
        out=by_token(work.out),
        heads=given.key.shape[2],
        tokens=given.key.shape[1],
        tile=scan_tile(choice, given.sizes),
    )


def fade_launch(decay: Tensor, faded: Tensor, sizes: ScanSizes) -> Launch:
    """The program that sums decays."""
    batch, tokens, heads, size = decay.shape
    channels = 1 if size == 1 else min(FADED, power_of_two(size))
    constants = map(tl.constexpr, (sizes.chunk, size, channels))
    call = Fade(by_token(decay), by_token(faded), heads, tokens, *constants)
    programs = batch * heads * -(-tokens // sizes.chunk) * -(-size // channels)
    return Launch(program=sum_decays, programs=programs, call=call, warps=4, stages=1)


def decode_launch(given: Given, out: Tensor, after: Tensor) -> Launch:
    """The program that goes token by token."""
    choice = ScanChoice(DECODED, DECODED, DECODE_WARPS, 1)
    batch, tokens, heads, _ = given.key.shape
    call = Decode(
        query=by_token(given.query),
        key=by_token(given.key),
        value=by_token(given.value),
        decay=by_token(given.decay if given.decay is None or given.sizes.channels else spaced(given.decay)),
        strength=by_token(given.strength),
        before=by_channel(given.before),
        after=by_channel(after),
        out=by_token(out),
        heads=heads,
        tokens=tokens,
        tile=scan_tile(choice, given.sizes),
    )
    programs = batch * heads * -(-given.sizes.value_size // DECODED)
    return Launch(program=go_through, programs=programs, call=call, warps=choice.warps, stages=choice.stages)

"""Launching the backward programs of a recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_kernels_triton.kernels.scan.arguments import Unscan
from attn_kernels_triton.kernels.scan.backward import uncorrect, unrecall, unremember
from attn_kernels_triton.kernels.scan.backward_key import gradient_to_channels
from attn_kernels_triton.launch import Launch, addressable
from attn_kernels_triton.scan.forward import launch_of, memory_launches, scan_of
from attn_kernels_triton.scan.tiles import ScanChoice
from attn_kernels_triton.scan.work import Between, Given, by_channel, by_token
from attn_kernels_triton.tuning.chosen import chosen_scan


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradients:
    """Gradients that are given and those that programs write; see `programs.scan.arguments.Unscan`.

    By the delta rule `news` is to what is written and `value` to the values; else they are one.
    """

    out: Tensor
    after: Tensor | None
    states: Tensor
    news: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    strength: Tensor | None
    before: Tensor | None


def gradients(given: Given, out: Tensor, after: Tensor | None, *, decays: bool) -> Gradients:
    """Fresh memory for gradients; `decays` says that those to log decays are wanted."""
    sizes, strength = given.sizes, given.strength
    news = given.rows(sizes.value_size)
    parts = sizes.key_size
    if not sizes.channels:
        parts = -(-sizes.key_size // chosen_scan("gradient_to_channels", given).keys)
    return Gradients(
        out=addressable(out),
        after=None if after is None else addressable(after),
        states=given.states(),
        news=news,
        query=given.rows(sizes.key_size),
        key=given.rows(sizes.key_size),
        value=news if strength is None else given.rows(sizes.value_size),
        decay=given.key.new_empty(*given.key.shape[:3], parts, dtype=torch.float32) if decays else None,
        strength=None if strength is None else torch.empty_like(strength, dtype=torch.float32),
        before=None if given.before is None else given.memory(),
    )


def backward_launches(given: Given, work: Between, found: Gradients) -> list[Launch]:
    """The programs in the order in which they run; memories are computed again."""
    programs = [unrecall, unremember, *([] if given.strength is None else [uncorrect]), gradient_to_channels]
    launches = memory_launches(given, work)
    for program in programs:
        choice = chosen_scan(program.__name__, given)
        launches.append(launch_of(program, unscan_of(given, work, found, choice), given, choice))
    return launches


def unscan_of(given: Given, work: Between, found: Gradients, choice: ScanChoice) -> Unscan:
    """What the programs have in common."""
    return Unscan(
        scan=scan_of(given, work, choice),
        out=by_token(found.out),
        after=by_channel(found.after),
        states=by_channel(found.states),
        news=by_token(found.news),
        before=by_channel(found.before),
        query=by_token(found.query),
        key=by_token(found.key),
        value=by_token(found.value),
        decay=by_token(found.decay),
        strength=by_token(found.strength),
    )


def backward(given: Given, out: Tensor, after: Tensor | None, work: Between, *, decays: bool) -> Gradients:
    """Gradients of those to the output and to the last memory, None for none."""
    found = gradients(given, out, after, decays=decays)
    for launch in backward_launches(given, work, found):
        launch.run(out.device)
    return found

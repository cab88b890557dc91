"""What is measured of linear recurrences by chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attn_kernels_triton.kernels.scan.backward import unrecall, unremember
from attn_kernels_triton.kernels.scan.forward import recall, remember
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.scan.backward import Gradients, gradients, unscan_of
from attn_kernels_triton.scan.forward import launch_of, scan_of
from attn_kernels_triton.scan.tiles import ScanChoice, scan_choice
from attn_kernels_triton.scan.work import Between, Given, between, spaced
from attn_kernels_triton.tuning.candidates import RECURRENCES, recurrence_name
from attn_kernels_triton.tuning.trial import Trial

BATCH, TOKENS, HEADS, SIZE = 4, 4096, 16, 128

PROGRAMS: dict[str, Any] = {program.__name__: program for program in (remember, recall, unrecall, unremember)}


def count() -> int:
    """How many candidates are measured."""
    return sum(map(len, RECURRENCES.values()))


def trials(device: torch.device) -> Iterator[Trial]:
    """Programs of the delta rule, which fades with a number for each head or each channel."""
    for channels in (False, True):
        given = steps(device, channels=channels)
        work = between(given)
        for part in (work.faded, work.solved, work.told, work.inverse, work.news, work.states):
            if part is not None:
                part.zero_()
        found = gradients(given, torch.randn_like(work.out), work.after, decays=True)
        found.states.zero_()
        found.news.zero_()
        for (program, apart), candidates in RECURRENCES.items():
            if apart == channels:
                for candidate in candidates:
                    launch = trial_launch(program, (given, work, found), candidate)
                    yield Trial(recurrence_name(program, channels=channels), candidate, (launch,))


def trial_launch(program: str, memory: tuple[Given, Between, Gradients], candidate: ScanChoice) -> Launch:
    """One program of a recurrence, with no more channels at once than there are."""
    given, work, found = memory
    choice = scan_choice(program, given.sizes, candidate)
    if program in {"remember", "recall"}:
        return launch_of(PROGRAMS[program], scan_of(given, work, choice), given, choice)
    return launch_of(PROGRAMS[program], unscan_of(given, work, found, choice), given, choice)


def steps(device: torch.device, *, channels: bool) -> Given:
    """Random steps in bfloat16, of which little is forgotten."""
    rows = torch.randn(3, BATCH, TOKENS, HEADS, SIZE, device=device).bfloat16()
    fades = -0.01 * torch.rand(BATCH, TOKENS, HEADS, SIZE if channels else 1, device=device)
    strength = spaced(torch.rand(BATCH, TOKENS, HEADS, 1, device=device))
    return Given(rows[0], rows[1], rows[2], fades, strength, None)

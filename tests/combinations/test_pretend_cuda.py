"""What a pretended GPU counts as a wait of the host, and as a copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attn_testing.law import LawBroken
from pretend_cuda import DEVICE, PretendCuda
from torch import Tensor


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    with PretendCuda() as counter, torch.inference_mode():
        yield counter


@pytest.fixture
def there(gpu) -> Tensor:
    """A tensor on the device, made before anything is counted."""
    rows = torch.zeros(4, 5, device=DEVICE)
    gpu.reset()
    return rows


def pinned(numbers: list[int]) -> Tensor:
    here = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
    here.numpy()[:] = numbers
    return here


def recorded(*_: Tensor) -> torch.cuda.Event:
    """An event after the work so far."""
    event = torch.cuda.Event()
    event.record()
    return event


SENDS: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
    "a tensor made of a list": (lambda rows: torch.tensor([1, 2], device=rows.device), 1, 1),
    "a number made there by a copy": (lambda rows: torch.tensor(1, device=rows.device), 1, 1),
    "a copy that blocks": (lambda rows: torch.ones(3).to(rows.device), 1, 1),
    "a copy that need not, of memory that is not pinned": (
        lambda rows: torch.ones(3).to(rows.device, non_blocking=True),
        1,
        1,
    ),
    "a copy that blocks, of pinned memory": (lambda rows: pinned([1, 2]).to(rows.device), 1, 1),
    "a copy of pinned memory": (lambda rows: pinned([1, 2]).to(rows.device, non_blocking=True), 0, 1),
    "a pinned copy": (lambda rows: torch.ones(3).pin_memory().to(rows.device, non_blocking=True), 0, 1),
    "a part of pinned memory": (lambda rows: pinned([1, 2])[1:].to(rows.device, non_blocking=True), 0, 1),
    "into memory of the device": (lambda rows: rows[0].copy_(torch.ones(5)), 1, 1),
    "into memory of the device, pinned": (
        lambda rows: rows[0].copy_(pinned([1, 2, 3, 4, 5]), non_blocking=True),
        0,
        1,
    ),
    "rows by a list": (lambda rows: rows[[0, 2]], 1, 1),
    "rows by a tensor of the host": (lambda rows: rows[torch.tensor([0, 2])], 1, 1),
    "rows by two lists": (lambda rows: rows[[0, 2], [1, 1]], 2, 2),
    "rows written by a list": (lambda rows: rows.index_put_((torch.tensor([0, 2]),), rows[:2].clone()), 1, 1),
    "rows by a tensor of the device": (lambda rows: rows[torch.arange(2, device=rows.device)], 0, 0),
    "a slice": (lambda rows: rows[1:3, ::2], 0, 0),
    "a number written": (lambda rows: rows.__setitem__(1, 7.0), 0, 0),
    "a number beside": (lambda rows: rows * 2 + torch.tensor(3.0), 0, 0),
    "a number read": (lambda rows: rows[0, 0].item(), 1, 0),
    "a copy back": (lambda rows: torch.zeros(5).copy_(rows[0]), 1, 0),
    "a copy back that need not block, to memory that is not pinned": (
        lambda rows: torch.zeros(5).copy_(rows[0], non_blocking=True),
        1,
        0,
    ),
    "a copy back to pinned memory": (lambda rows: pinned([0] * 5).copy_(rows[0], non_blocking=True), 0, 0),
    "an event": (lambda rows: recorded(rows + 1).synchronize(), 1, 0),
    "an event whose work is known to be done": (lambda rows: ((rows + 1).tolist(), recorded().synchronize()), 1, 0),
    "an event before more work": (lambda rows: (recorded(rows + 1), rows + 2)[0].synchronize(), 1, 0),
    "an event that was never recorded": (lambda _: torch.cuda.Event().synchronize(), 0, 0),
    "all numbers read": (lambda rows: rows.tolist(), 1, 0),
}


@pytest.mark.parametrize("name", SENDS)
def test_waits_and_copies_are_those_of_a_gpu(gpu, there, name):
    act, waits, copies = SENDS[name]
    act(there)
    assert (gpu.syncs.total(), gpu.copies) == (waits, copies)


def test_what_was_copied_is_there(gpu):
    assert pinned([3, 4]).to(DEVICE, non_blocking=True).tolist() == [3, 4]
    rows = torch.zeros(2, 2, device=DEVICE)
    rows[[1], [0]] = 5.0
    assert rows.tolist() == [[0, 0], [5, 0]]


def test_pinned_memory_that_is_written_before_its_copy_has_ended_is_found(gpu, there):
    here = pinned([1, 2, 3, 4, 5])
    there[0].copy_(here, non_blocking=True)
    copied = recorded()
    here[0] = 7
    with pytest.raises(LawBroken):
        copied.synchronize()


def test_pinned_memory_may_be_written_once_the_host_has_waited_for_its_copy(gpu, there):
    here = pinned([1, 2, 3, 4, 5])
    there[0].copy_(here, non_blocking=True)
    recorded().synchronize()
    here[0] = 7
    there.tolist()

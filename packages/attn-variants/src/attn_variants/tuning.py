"""Benchmarks of the attention kernels on this machine's GPU, for `attn tune`.

Calls are timed back to back, so that the launch overhead of the CPU counts if it exceeds the time on the GPU. A kernel
with a wrong result is recorded as failed, and never chosen.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window, installed
from attn_core.kernels import devices
from attn_core.kernels.attend import AttendKernel, AttendProblem, attend_problem
from attn_core.kernels.measured import PLAIN, CostTable, MeasuredCall, Times
from attn_core.masks import Prefix
from torch import Tensor

TOKENS, HEADS = 16384, 16
"""The number of keys of all sequences of a call together, from which the batch size follows, and of heads."""

MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Window(left=1023),
    "prefix": Causal() | Prefix(512),
}
"""The masks that are benchmarked."""

LONG_MASKS = {"window": 1024, "prefix": 1024}
"""These masks are benchmarked with more keys than this; with fewer, they allow nearly all pairs."""

LENGTHS = (1024, 4096, 16384, 512)
"""The numbers of keys of a sequence, the most important first."""

MOST_SCORES = 1 << 31
"""The largest number of scores for which the plain computation is measured: more do not fit in memory."""

SHORT = 1280
"""The number of keys for checking results against the plain computation: more than the window, and more than the number
below which kernels take another path for few keys."""

WORST = 0.02
"""The largest error of a correct output or gradient, relative to the plain computation in float32."""

WARMING, ROUNDS, CALLS = 2, 3, 4
"""Warm-up calls, timed rounds, and calls per round (one for the plain computation)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of call that is benchmarked."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    keys: int
    gradients: bool
    decoding: bool = False

    @property
    def queries(self) -> int:
        """The number of queries of a sequence: one in decoding."""
        return 1 if self.decoding else self.keys

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return max(1, TOKENS // self.keys)

    def shorter(self) -> Case:
        """The same case with fewer keys, for checking the result of a kernel."""
        return dataclasses.replace(self, keys=min(self.keys, SHORT))

    def spec(self) -> AttentionSpec:
        """The attention spec of the case."""
        heads = Heads(query=HEADS, key_value=HEADS, key_size=self.head_dim, value_size=self.head_dim)
        return AttentionSpec(heads=heads, mask=MASKS[self.mask])

    def problem(self, device: str) -> AttendProblem:
        """The problem by which kernels decide whether they support the case, and at what cost."""
        dtype = str(self.dtype).removeprefix("torch.")
        return attend_problem(
            self.spec(),
            dtype=dtype,
            device=device,
            gradients=self.gradients,
            padded=False,
            queries=self.queries,
            keys=self.keys,
        )

    def inputs(self, device: torch.device, batch: int) -> AttentionInputs:
        """Normally distributed inputs, the same for every kernel."""
        made = torch.Generator(device).manual_seed(0)
        rows = [
            torch.randn(batch, length, HEADS, self.head_dim, dtype=self.dtype, device=device, generator=made)
            for length in (self.queries, self.keys, self.keys)
        ]
        query, key, value = (part.requires_grad_(self.gradients) for part in rows)
        return AttentionInputs(query=query, key=key, value=value)


def cases(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> list[Case]:
    """The cases to benchmark, the most common in training and serving first."""
    found = []
    for mask, keys, dtype, head_dim, gradients in itertools.product(MASKS, LENGTHS, dtypes, head_dims, (True, False)):
        if keys > LONG_MASKS.get(mask, 0):
            found.append(Case(dtype=dtype, head_dim=head_dim, mask=mask, keys=keys, gradients=gradients))
    single = {"mask": "full", "gradients": False, "decoding": True}
    return (
        found
        + [
            Case(dtype=dtype, head_dim=head_dim, keys=keys, **single)  # type: ignore[arg-type]
            for dtype, head_dim, keys in itertools.product(dtypes, head_dims, LENGTHS[:3])
        ]
    )


def measure(wanted: list[Case], device: torch.device, seconds: float = float("inf")) -> Iterator[Times]:
    """Yield the times of every kernel that supports a case, case by case; stop when the seconds are used up."""
    ends = time.monotonic() + seconds
    right: dict[tuple[object, ...], bool] = {}
    for case in wanted:
        found: dict[str, float | None] = {}
        for kernel in accepting(case, device):
            if time.monotonic() > ends:
                return
            if kernel.name == PLAIN and case.batch * HEADS * case.queries * case.keys > MOST_SCORES:
                continue
            kind = kernel.name, case.shorter()
            if kind not in right:
                right[kind] = is_right(kernel, case.shorter(), device)
            found[kernel.name] = microseconds(kernel, case, device) if right[kind] else None
        yield Times(call=MeasuredCall(**(case.problem(device.type).measured_as() or {})), microseconds=found)


def accepting(case: Case, device: torch.device) -> list[AttendKernel]:
    """The kernels that support a case, the plain computation first."""
    problem = case.problem(device.type)
    found = [
        kernel
        for kernel in installed().kernels
        if isinstance(kernel, AttendKernel)
        and not kernel.alters
        and kernel.available() is None
        and not kernel.refusals(problem)
    ]
    return sorted(found, key=lambda kernel: kernel.name != PLAIN)


def is_right(kernel: AttendKernel, case: Case, device: torch.device) -> bool:
    """Whether a kernel matches the plain computation in float32, in its output and gradients."""
    if kernel.name == PLAIN:
        return True
    inputs = case.inputs(device, batch=2)
    exact = dataclasses.replace(
        inputs, **{name: getattr(inputs, name).detach().float().requires_grad_(case.gradients) for name in ROWS}
    )
    plain = next(one for one in installed().kernels if isinstance(one, AttendKernel) and one.name == PLAIN)
    try:
        found = results(kernel, case, inputs)
    except Exception:  # noqa: BLE001 -- whatever a kernel raises on this chip
        return False
    wanted = results(plain, case, exact)
    errors = [float((a.float() - b).detach().norm() / b.detach().norm()) for a, b in zip(found, wanted, strict=True)]
    return all(error < WORST for error in errors)


ROWS = ("query", "key", "value")


def results(kernel: AttendKernel, case: Case, inputs: AttentionInputs) -> list[Tensor]:
    """The output, followed by the gradients of query, key and value if the case has them."""
    with nullcontext() if case.gradients else torch.no_grad():
        out = kernel.run(case.spec(), inputs)
    if not case.gradients:
        return [out]
    change = torch.linspace(-1, 1, out.shape[-1], dtype=torch.float32, device=out.device).to(out.dtype).expand_as(out)
    return [out, *torch.autograd.grad(out, [getattr(inputs, name) for name in ROWS], change)]


def microseconds(kernel: AttendKernel, case: Case, device: torch.device) -> float | None:
    """The time of a call in microseconds, including the backward pass if the case has one; None if the kernel fails."""
    try:
        inputs = case.inputs(device, case.batch)
        calls = 1 if kernel.name == PLAIN else CALLS
        return round(1e6 * mean_time(lambda: results(kernel, case, inputs), device, calls), 1)
    except Exception:  # noqa: BLE001 -- whatever a kernel raises on this chip
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def mean_time(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """The mean time of one of several back-to-back calls, in seconds; the median over the rounds."""
    for _ in range(WARMING):
        call()
    return statistics.median(one_round(call, device, calls) for _ in range(ROUNDS))


def one_round(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """The mean time of the calls of one round, in seconds."""
    wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return (time.perf_counter() - began) / calls


def wait(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table_of(rows: list[Times], gpu: devices.Gpu) -> CostTable:
    """The cost table of the times measured on a GPU."""
    origin = {
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    origin["shape"] = f"{TOKENS} tokens, {HEADS} heads"
    return CostTable(device=gpu.name, capability=gpu.capability, origin=origin, rows=tuple(rows))


def installed_version(name: str) -> str:
    """The version of a package, or "none" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"

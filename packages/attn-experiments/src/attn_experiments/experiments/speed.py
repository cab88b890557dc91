"""Claims 9, 53 and 57, about speed, measured on this machine."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attn_core.errors import Unavailable
from attn_kernels_cpu.products import product
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_experiments.report import Curves, Result, Settings, judged
from attn_experiments.small_models import layer

NOISE = "times of a busy machine vary"


def seconds(action: Callable[[], object], times: int = 3) -> float:
    """The minimum processor time, in seconds, of `times` calls after one warm-up call."""
    action()
    found = []
    for _ in range(times):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent of the power law that fits the values best (the slope of log value over log size)."""
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope


def growth(name: str, lengths: Sequence[int], **options: Any) -> list[float]:
    """The processor seconds of one layer for sequences of these lengths; SDPA computes full matrices (MATH backend)."""
    found = []
    torch.manual_seed(0)
    own = layer(
        name, hidden_size=32, num_heads=2, causal=False, max_seq_len=max(lengths), options=options or None
    ).eval()
    for length in lengths:
        rows = torch.randn(1, length, 32)
        with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
            found.append(seconds(lambda own=own, rows=rows: own(rows)))  # type: ignore[misc]
    return found


def square_of_the_length(settings: Settings) -> Result:
    """CL-9 and CL-53: the time of a layer by sequence length, for full attention and for linear-time mechanisms."""
    lengths = [settings.steps(length) for length in (512, 1024, 2048, 4096)]
    kinds = {"mha": {}, "linear": {}, "performer": {"features": 32}, "linformer": {"rank": 32}}
    rows, lines, slopes = [], {}, {}
    for name, options in kinds.items():
        times = growth(name, lengths, **options)
        slopes[name] = slope(lengths[1:], times[1:])
        lines[name] = list(zip(map(float, lengths), times, strict=True))
        cells = {f"{n} tokens": f"{1000 * t:.1f} ms" for n, t in zip(lengths, times, strict=True)}
        rows.append({"mechanism": name} | cells | {"grows as": f"n^{slopes[name]:.2f}"})
        settings.say(str(rows[-1]))
    verdict, because = judged(
        all_of={
            f"all pairs take time as n^1.7 or more (n^{slopes['mha']:.2f})": slopes["mha"] > 1.7,
            "the others as n^1.4 or less": max(slopes[name] for name in kinds if name != "mha") < 1.4,
        }
    )
    shown = Curves(title="Time of a layer", x="tokens", y="seconds", lines=lines, logarithmic=True)
    return Result(rows=rows, verdict=verdict, because=f"{because}; {NOISE}", curves=shown)


RECORDED = {"plain Python": 0.042, "numpy, float32": 29.0, "torch, float32, all threads": 85.0}
"""The GFLOPS of the course's table, of another machine."""


def in_python(size: int) -> Callable[[], object]:
    """A function that multiplies two matrices in plain Python."""
    drawn = random.Random(0)
    one, other = ([[drawn.random() for _ in range(size)] for _ in range(size)] for _ in range(2))
    columns = list(zip(*other, strict=True))
    return lambda: [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in one]


def in_numpy(size: int) -> Callable[[], object]:
    """A function that multiplies two matrices with numpy's BLAS, in float32."""
    one, other = (np.random.default_rng(seed).random((size, size), dtype=np.float32) for seed in (0, 1))
    return lambda: one @ other


def in_torch(size: int, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    """A function that multiplies two matrices with torch."""
    one, other = (torch.rand(size, size).to(dtype) for _ in range(2))
    return lambda: one @ other


def in_cpp(size: int) -> Callable[[], object]:
    """A function that multiplies two matrices with the C++ of attn-kernels-cpu, which raises `Unavailable` where it has
    no kernels."""
    one, other = torch.rand(size, size), torch.rand(size, size)
    return lambda: product(one, other)


def by_loops_of_torch(size: int) -> Callable[[], object]:
    """A function that multiplies two matrices row by row with torch, to show the overhead of calls."""
    one, other = torch.rand(size, size), torch.rand(size, size)
    return lambda: [row @ other for row in one]


def products(settings: Settings) -> Result:
    """CL-57: the GFLOPS of a matrix product, from plain Python to a BLAS with all threads."""
    size, threads = settings.steps(768), torch.get_num_threads()
    cases: list[tuple[str, int, Callable[[], object], int]] = [
        ("plain Python", settings.steps(96), in_python(settings.steps(96)), 1),
        ("torch, row by row", size, by_loops_of_torch(size), 1),
        ("numpy, float32", size, in_numpy(size), 1),
        ("torch, float32, one thread", size, in_torch(size), 1),
        ("torch, bfloat16, one thread", size, in_torch(size, torch.bfloat16), 1),
        ("torch, float32, all threads", size, in_torch(size), threads),
        ("C++ of attn-kernels-cpu, one thread", size, in_cpp(size), 1),
        ("C++ of attn-kernels-cpu, all threads", size, in_cpp(size), threads),
    ]
    rows, found = [], {}
    for name, n, action, own in cases:
        torch.set_num_threads(own)
        try:
            action()
        except Unavailable as error:
            settings.say(f"{name}: left out: {error}")
            continue
        began = time.perf_counter()
        times = 0
        while times < 3 or time.perf_counter() - began < 0.3:
            action()
            times += 1
        found[name] = 2 * n**3 * times / (time.perf_counter() - began) / 1e9
        rows.append({"how": name, "size": n, "threads": own, "GFLOPS": f"{found[name]:.3g}"})
    torch.set_num_threads(threads)
    fast = max(found["numpy, float32"], found["torch, float32, one thread"])
    verdict, because = judged(
        all_of={
            "plain Python is more than a hundred times slower than numpy": found["plain Python"]
            < found["numpy, float32"] / 100,
            "numpy and torch are within a factor of 4 of each other": min(
                found["numpy, float32"], found["torch, float32, one thread"]
            )
            > fast / 4,
            "the numbers are those on record, within a fifth": all(
                abs(found[name] / recorded - 1) < 0.2 for name, recorded in RECORDED.items()
            ),
        }
    )
    said = f"{because}; the table on record is of another machine; {NOISE}"
    return Result(rows=rows, verdict=verdict, because=said)

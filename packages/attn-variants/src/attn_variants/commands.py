"""The command `attn tune`. Torch is imported only if there is a GPU to measure."""

from __future__ import annotations

from typing import Annotated

import typer
from attn_core.errors import Incompatible
from attn_core.kernels import devices
from attn_core.kernels.measured import path_of, write


def tune(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="The time limit in minutes; the most common calls are measured first.")
    ] = 10,
    float16: Annotated[bool, typer.Option("--float16", help="Also measure float16, in addition to bfloat16.")] = False,  # noqa: FBT002 -- the user gives it as a flag
) -> None:
    """Benchmark the attention kernels on this machine's GPU, and store the times from which kernels are chosen.

    The results are written to $ATTN_TUNING (~/.cache/attn by default), where `attn explain` and all models read them:
    one row for each combination of dtype, head size, mask, length, and forward or forward and backward pass. A kernel
    that fails or gives a wrong result is marked as failed and not chosen. The tile sizes of the Triton kernels are
    tuned by `python -m attn_kernels_triton.tuning`, which is best run first.
    """
    gpu = devices.nvidia_gpu()
    if gpu is None:
        message = "attn tune needs an NVIDIA GPU, and this machine has none; on a CPU, costs are predicted instead"
        raise Incompatible(message)
    import torch

    from attn_variants.tuning import cases, measure, table_of

    dtypes = (torch.bfloat16, torch.float16) if float16 else (torch.bfloat16,)
    rows = []
    for row in measure(cases((64, 128), dtypes), torch.device("cuda"), 60 * minutes):
        rows.append(row)
        call, times = row.call, sorted(row.microseconds.items(), key=lambda found: found[1] or float("inf"))
        listed = ", ".join(f"{name} {'failed' if time is None else f'{time:.0f}'}" for name, time in times)
        passes = "forward and backward" if call.gradients else "forward"
        typer.echo(
            f"{call.dtype} {call.head_dim} {call.mask} {call.queries} x {call.keys}, {passes}, microseconds: {listed}"
        )
        write(path_of(gpu), table_of(rows, gpu))
    typer.echo(f"kept in {path_of(gpu)}")

"""What an actor asks of Ray so that it sees the GPU it is to compute on, and no other.

Ray counts GPUs and sets `CUDA_VISIBLE_DEVICES` in actors that ask for some. In one that asks for none it leaves the
variable as it is, so that what torch takes there would be counted nowhere: such an actor is shown no GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_schema.device import AUTO, DEVICE

VISIBLE = "CUDA_VISIBLE_DEVICES"
KEEP_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Tells Ray to leave the former as it is."""
FREED_SECONDS = 5.0
"""How long Ray may take to count as free what an actor that ended had."""
POLL_SECONDS = 0.2
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """Options of an actor, and the `device` that it computes on then, by its name in the actor."""

    device: str
    num_gpus: float = 0.0
    env_vars: Mapping[str, str] = field(default_factory=dict)


def gpu_request(device: str, share: float, known: float) -> GpuRequest:
    """What to ask for to compute on `device` with this share of a GPU, where Ray knows this many.

    `cuda` is any GPU that Ray has free, `cuda:INDEX` that of the machine, which Ray counts but does not choose; `auto`
    is `cuda` where Ray knows a GPU. Raises `InvalidValue` for a GPU where Ray knows none.
    """
    wanted = DEVICE.fullmatch(device)
    if not device.startswith("cuda") and not (device == AUTO and known > 0):
        return GpuRequest(device=device, env_vars={VISIBLE: ""})
    if known <= 0:
        allowed = f"cpu or auto, as Ray finds no GPU in its cluster; those of {VISIBLE} are found when it starts"
        raise InvalidValue.of("device", device, allowed)
    if wanted is not None and wanted["index"] is not None:
        return GpuRequest(device=device, num_gpus=share, env_vars={KEEP_VISIBLE: "1"})
    return GpuRequest(device="cuda", num_gpus=share)


def known_gpus() -> float:
    """How many GPUs the cluster that this process is in has."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def free_gpus() -> float:
    """How many of them nobody has asked for."""
    import ray

    return float(ray.available_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


async def require_free(request: GpuRequest, remedy: str) -> None:
    """Raise `OutOfCapacity` with a `remedy` unless Ray has as much of a GPU free; it would wait for it forever."""
    end = time.monotonic() + FREED_SECONDS
    while request.num_gpus and (free := await asyncio.to_thread(free_gpus)) + ROUNDING < request.num_gpus:
        if time.monotonic() > end:
            raise OutOfCapacity(
                f"device {request.device} asks Ray for {request.num_gpus:g} of a GPU; {free:g} of {known_gpus():g} "
                f"are free: {remedy}",
                device=request.device,
                needed_gpus=f"{request.num_gpus:g}",
                free_gpus=f"{free:g}",
            )
        await asyncio.sleep(POLL_SECONDS)

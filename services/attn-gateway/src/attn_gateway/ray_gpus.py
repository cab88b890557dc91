"""The Ray options with which an actor sees the GPU on which it computes, and no other.

Ray counts GPUs and sets `CUDA_VISIBLE_DEVICES` in actors that request some. In an actor that requests none it leaves
the variable unchanged, so that GPU memory used there would not be counted: all GPUs are hidden from such an actor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_schema.device import AUTO, DEVICE, VISIBLE

KEEP_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variable that makes Ray leave `CUDA_VISIBLE_DEVICES` unchanged."""
FREED_SECONDS = 5.0
"""How long Ray may take to count the GPUs of an actor that ended as free."""
POLL_SECONDS = 0.2
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """The Ray options of an actor, and the `device` on which it then computes, as named inside the actor."""

    device: str
    num_gpus: float = 0.0
    env_vars: Mapping[str, str] = field(default_factory=dict)


def gpu_request(device: str, share: float, known: float) -> GpuRequest:
    """The request for computing on `device` with the fraction `share` of a GPU, if Ray has `known` GPUs.

    `cuda` is any free GPU that Ray assigns, `cuda:INDEX` that GPU of the machine, which Ray counts but does not choose;
    `auto` is `cuda` if Ray has a GPU. Raises `InvalidValue` for a GPU if Ray has none.
    """
    wanted = DEVICE.fullmatch(device)
    if not device.startswith("cuda") and not (device == AUTO and known > 0):
        return GpuRequest(device=device, env_vars={VISIBLE: ""})
    if known <= 0:
        allowed = f"cpu or auto, as Ray finds no GPU in its cluster; {VISIBLE} is read when Ray starts"
        raise InvalidValue.of("device", device, allowed)
    if wanted is not None and wanted["index"] is not None:
        return GpuRequest(device=device, num_gpus=share, env_vars={KEEP_VISIBLE: "1"})
    return GpuRequest(device="cuda", num_gpus=share)


def known_gpus() -> float:
    """The number of GPUs of the Ray cluster that this process belongs to."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def free_gpus() -> float:
    """The number of these GPUs that no actor or task has reserved."""
    import ray

    return float(ray.available_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def require_free(request: GpuRequest, remedy: str) -> None:
    """Raise `OutOfCapacity` with a `remedy` unless Ray has the requested GPU share free; Ray would wait forever."""
    end = time.monotonic() + FREED_SECONDS
    while request.num_gpus and (free := free_gpus()) + ROUNDING < request.num_gpus:
        if time.monotonic() > end:
            raise OutOfCapacity(
                f"device {request.device} needs {request.num_gpus:g} of a GPU from Ray; {free:g} of {known_gpus():g} "
                f"are free: {remedy}",
                device=request.device,
                needed_gpus=f"{request.num_gpus:g}",
                free_gpus=f"{free:g}",
            )
        time.sleep(POLL_SECONDS)

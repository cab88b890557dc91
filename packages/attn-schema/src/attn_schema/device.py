"""The device and element type that a model is computed with: options of every command that runs a model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, TypeAlias

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.schema import Checked

AUTO = "auto"
"""Selects the device or element type automatically, to suit the machine."""

DEVICE = re.compile(r"auto|cpu|mps|cuda(:(?P<index>0|[1-9]\d{0,2}))?")
DEVICES = "auto, cpu, cuda, cuda:INDEX or mps"
"""The allowed device names, as shown in error messages."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that a process may use."""
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")

Device: TypeAlias = Annotated[
    str,
    Meta(
        description="Device to compute on: cpu, cuda, cuda:INDEX or mps; auto takes a GPU if there is one.",
        extra={"metavar": "auto|cpu|cuda[:INDEX]|mps"},
    ),
]
"""The type of every field that names a device; classes with such a field call `require_device`."""


def require_device(field: str, device: str) -> None:
    """Raise `InvalidValue` unless `device` is a valid device name; whether this machine has it is not checked."""
    if not DEVICE.fullmatch(device):
        raise InvalidValue.of(field, device, DEVICES)


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them, found without torch."""
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in {"", "-1"}]
    return [str(index) for index, _ in enumerate(NVIDIA_GPUS.iterdir())] if NVIDIA_GPUS.is_dir() else []


class DeviceConfig(Checked, frozen=True, kw_only=True):
    """The device and element type that a model is computed with."""

    dtype: Annotated[
        str,
        Meta(
            description="Element type to compute in, such as float32 or bfloat16; auto is bfloat16 on a CUDA device "
            "that has it, else float32."
        ),
    ] = AUTO  # fmt: skip
    device: Device = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device("device", self.device)

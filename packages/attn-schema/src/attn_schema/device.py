"""Where a model is computed, and in which element type: the options that every command with a model has."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.schema import Checked

AUTO = "auto"
"""The device or element type that suits the machine."""

DEVICE = re.compile(r"auto|cpu|mps|cuda(:(?P<index>0|[1-9]\d{0,2}))?")
DEVICES = "auto, cpu, cuda, cuda:INDEX or mps"
"""What a device may be called, for people."""

Device: TypeAlias = Annotated[
    str,
    Meta(
        description="Device to compute on: cpu, cuda, cuda:INDEX or mps; auto takes a GPU if there is one.",
        extra={"metavar": "auto|cpu|cuda[:INDEX]|mps"},
    ),
]
"""The type of every field that names a device; its noun calls `require_device`."""


def require_device(field: str, device: str) -> None:
    """Raise `InvalidValue` unless `device` is a name that a device may have, on whatever machine."""
    if not DEVICE.fullmatch(device):
        raise InvalidValue.of(field, device, DEVICES)


class DeviceConfig(Checked, frozen=True, kw_only=True):
    """Where a model is computed, and in which element type."""

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

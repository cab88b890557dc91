"""The option of every mechanism whose pairs a small network scores."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig

from attn_variants.mechanisms.options import check_whole


@dataclass(frozen=True, kw_only=True)
class HiddenConfig(MechanismConfig):
    """`hidden` units of the network of one head; by default the size of the head."""

    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None:
            check_whole("hidden", self.hidden, "units")

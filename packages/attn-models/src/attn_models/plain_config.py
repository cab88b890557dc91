"""A config whose fields are checked by their types, and that is read from and written as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from attn_models.decoder.checks import plain_fields, require_between, require_count, require_flag


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Whole numbers are counts from 1, others are from 0, those called dropout below 1; else raises `InvalidValue`."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                require_count(item.name, value)
            elif item.type == "bool":
                require_flag(item.name, value)
            elif item.type == "float":
                require_between(item.name, value, 0.0, 1.0 if item.name.endswith("dropout") else math.inf)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, which `from_plain` turns back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config of plain values, such as JSON's, whose whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        return cls(**plain_fields(cls, values, "the model"))

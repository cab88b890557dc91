"""What models that read a source are made of, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from attn_models.decoder.checks import plain_fields, require_between, require_choice, require_count, require_flag


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """What all of them have: one vocabulary for source and target, and the longest of each in tokens.

    `width` is the size of the decoder's state or residual stream; `dropout` acts in training. Raises `InvalidValue` for
    a field outside its range.
    """

    vocabulary: int
    context: int
    source_context: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                require_count(item.name, value)
            elif item.type == "bool":
                require_flag(item.name, value)
            elif item.type == "float":
                require_between(item.name, value, 0.0, 1.0 if item.name == "dropout" else math.inf)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, which `from_plain` turns back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config of plain values, such as JSON's, whose whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        return cls(**plain_fields(cls, values, "the model"))


@dataclass(frozen=True, kw_only=True)
class BottleneckConfig(SourceConfig):
    """Two stacks of `layers` LSTMs (Sutskever et al. 2014); `embedding` is the size of a token's vector.

    `reverse_source` reads the source from its end.
    """

    embedding: int
    layers: int = 1
    reverse_source: bool = True


@dataclass(frozen=True, kw_only=True)
class RnnsearchConfig(SourceConfig):
    """RNNsearch (Bahdanau et al. 2015): `width` n of a state, `embedding` m, `maxout` l units before the vocabulary.

    Annotations have 2 n numbers; `mechanism` attends to them, with `heads` heads and its own `options`.
    """

    embedding: int
    maxout: int
    mechanism: str = "alignment"
    options: Mapping[str, Any] = field(default_factory=dict)
    heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.mechanism, self.options)


@dataclass(frozen=True, kw_only=True)
class LuongConfig(BottleneckConfig):
    """LSTM stacks with an attention after the last (Luong et al. 2015): `mechanism` is luong, local_m or local_p.

    `input_feeding` gives what came out of a step to the next.
    """

    mechanism: str = "luong"
    options: Mapping[str, Any] = field(default_factory=dict)
    heads: int = 1
    input_feeding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.mechanism, self.options)

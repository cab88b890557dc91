"""Configuration of a mechanism: the fields that all mechanisms share, and type checks of their own options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from attn_core.checks import check_fields, is_number
from attn_core.errors import InvalidValue
from attn_core.heads import HeadRange, Heads
from attn_core.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """The fields that a model sets for any mechanism; a mechanism's own options are fields of a subclass, with
    their bounds if they are declared with `attn_core.checks.checked`.

    `hidden_size` is the model's; `num_kv_heads` and `head_dim` default to `num_heads` and `hidden_size / num_heads`;
    `max_seq_len` is the longest sequence, where one is fixed. `bias` adds biases to the projections; `output_bias`
    overrides it for the output projection, where it is not None. A layer with `shares_kv` attends to the keys and
    values of another layer, and neither projects nor caches its own. `layer` is the layer's index in an encoder, from
    0, for random choices that are made once and should differ between layers; it is 0 for all layers of a decoder.
    A layer with `cross` attends to a source, such as an encoder's output, all of it at any time, so that `causal` has
    no meaning. `dropout` is the probability with which attention weights become zero, in training only (Srivastava et
    al. 2014). `heads_of` gives the range of these heads in a layer that is split over ranks; `attn_core.splitting`
    sets it.
    """

    hidden_size: int
    num_heads: int = 1
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    bias: bool = False
    output_bias: bool | None = None
    rotary: Rotary | None = None
    max_seq_len: int | None = None
    shares_kv: bool = False
    cross: bool = False
    layer: int = 0
    dropout: float = 0.0
    heads_of: HeadRange | None = None

    def __post_init__(self) -> None:
        for field in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidValue.of(field, value, "a whole number from 1")
        if type(self.layer) is not int or self.layer < 0:
            raise InvalidValue.of("layer", self.layer, "a whole number from 0")
        if not is_number(self.dropout) or not 0 <= self.dropout <= 1:
            raise InvalidValue.of("dropout", self.dropout, "a number from 0 to 1")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InvalidValue.of(
                "num_heads", self.num_heads, f"a divisor of hidden_size {self.hidden_size}, or an explicit head_dim"
            )
        check_option_types(self)
        check_fields(self)

    @classmethod
    def of(cls, config: MechanismConfig) -> Self:
        """The config itself if it is of this class, else its shared fields with the defaults of this class."""
        if isinstance(config, cls):
            return config
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(MechanismConfig)})

    @property
    def has_output_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def head_layout(self) -> Heads:
        """The numbers and sizes of heads; raises `InvalidValue` where key/value heads do not divide the query heads."""
        size = self.head_dim or self.hidden_size // self.num_heads
        return Heads(
            query=self.num_heads, key_value=self.num_kv_heads or self.num_heads, key_size=size, value_size=size
        )


SHARED_FIELDS = frozenset(field.name for field in dataclasses.fields(MechanismConfig))


LONGEST = 1 << 63
"""The smallest number that does not fit into a signed 64-bit integer."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LONGEST


SIMPLE: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "int": (_is_whole, "a whole number of 64 bits"),
    "float": (is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "None": (lambda value: value is None, "none"),
}
"""For each type name in an annotation: a predicate for values of the type, and a description of it for users."""


def check_option_types(config: MechanismConfig) -> None:
    """Raise `InvalidValue` for an option that is not of its annotated type, if that is `SIMPLE` or a union of such.

    Subclasses can then compare numbers with their bounds without checking their types first.
    """
    for field in dataclasses.fields(config):
        annotation = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        kinds = [SIMPLE[kind] for kind in annotation.split(" | ") if kind in SIMPLE]
        if field.name in SHARED_FIELDS or len(kinds) <= annotation.count(" | "):
            continue
        value = getattr(config, field.name)
        if not any(is_one(value) for is_one, _ in kinds):
            raise InvalidValue.of(field.name, value, " or ".join(words for _, words in kinds))


def check_config_type(config: type[MechanismConfig], *, owner: str) -> None:
    """Raise `TypeError`, when `owner` is created, for a `Config` that is not a frozen, keyword-only dataclass."""
    fields = dataclasses.fields(config)
    frozen = config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if not frozen or not all(field.kw_only for field in fields) or "__dataclass_fields__" not in vars(config):
        raise TypeError(f"{owner}.Config must be decorated with @dataclass(frozen=True, kw_only=True)")
    own = config.__mro__[: config.__mro__.index(MechanismConfig)]
    named = {name for kind in own for name in vars(kind).get("__annotations__", {})}
    if taken := sorted(named & {field.name for field in dataclasses.fields(MechanismConfig)}):
        raise TypeError(f"{owner}.Config: every layer has a field {taken[0]}; the option needs another name")

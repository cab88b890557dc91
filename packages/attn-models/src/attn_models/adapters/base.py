"""State dict adapters: the one place that knows the config keys and tensor names of another library."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.errors import InvalidValue

from attn_models.decoder.config import DecoderConfig
from attn_models.plain_config import whole


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint and where it goes in the decoder.

    `parts` are the decoder's parameters that lie in it, one after the other along their first axis; `transposed`
    says that the checkpoint keeps it with both axes exchanged; `below` is by how much its numbers lie below ours,
    `factor` how many times ours are as large. With several `groups` the first axis is so many equal pieces, such as
    heads, and each holds a piece of every part. `exact` keeps it in float32 whatever the type of the weights.
    `single` says that the checkpoint's tensor has a second axis of one, as the filters of a convolution over each
    channel alone do.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    below: float = 0.0
    factor: float = 1.0
    groups: int = 1
    exact: bool = False
    single: bool = False


class Layout(ABC):
    """How the tensors of a kind of checkpoint are named. `model_type` is the word in its config.json.

    `head` is its name of the unembedding, which may be there although it is tied; what `derived` finds in a name
    marks tensors that follow from the config, such as causal masks, which older versions wrote, or are not used.
    """

    model_type: ClassVar[str]
    head: ClassVar[str] = ""
    derived: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")

    @abstractmethod
    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """The tensors of a checkpoint of a model with these parameters."""

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """The names of a checkpoint's tensors by the names that `stored` uses."""
        return {name: name for name in names}

    def derives(self, name: str) -> bool:
        """Whether a tensor of this name follows from the config or is not used."""
        return bool(self.derived.search(name))


class StateDictAdapter(Layout):
    """A layout of the checkpoints of decoders. `reads` are the keys of its config.json that `configure` knows."""

    reads: ClassVar[frozenset[str]]

    def layout(self, config: DecoderConfig) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """How the tensors of this decoder are named."""
        return self

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    def filled(self, config: DecoderConfig, names: Iterable[str]) -> DecoderConfig:  # noqa: ARG002  (few leave out)
        """The decoder without what tensors of these names leave out, though the config.json speaks of it."""
        return config

    @abstractmethod
    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """The config.json of a decoder; raises `Incompatible` naming what the layout cannot say."""


def needed(values: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; raises `InvalidValue` if it is missing or null."""
    value = values.get(key)
    if value is None:
        raise InvalidValue(f"{key}: is missing", field=key)
    return value


def required_count(values: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """The whole number at `key`; raises `InvalidValue` for any other value, or if it is missing without a default."""
    value = whole(needed(values, key) if default is None else values.get(key, default))
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue.of(key, value, f"a whole number from {least}")
    return value


def layer_kinds(values: Mapping[str, Any], layers: int, kinds: tuple[str, str], period: int) -> list[str]:
    """The `layer_types` of a config.json; where it has none those of one period, the last of another kind.

    `kinds` are the usual one and the last. Raises `InvalidValue` where they are not said for each of the layers.
    """
    given = values.get("layer_types")
    if given is None:
        return [kinds[0]] if period > layers else [kinds[0]] * (period - 1) + [kinds[1]]
    if not isinstance(given, list) or len(given) != layers or any(kind not in kinds for kind in given):
        raise InvalidValue.of("layer_types", given, f"{kinds[0]!r} or {kinds[1]!r} for each of {layers} layers")
    return given


def require_allowed(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `InvalidValue` for a key of `allowed` whose value is given and not one of those allowed.

    What a checkpoint asks for and the decoder does not compute must stop it, not be passed over.
    """
    for key, choices in allowed.items():
        if key in values and values[key] not in choices:
            raise InvalidValue.of(key, values[key], " or ".join(repr(choice) for choice in choices))


ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# What is built on top of an encoder, by the names that transformers gives it.
HEADS = re.compile(r"^(pooler|cls|lm_head|classifier|qa_outputs|sequence_summary)\.|position_ids$")


class EncoderAdapter(Layout):
    """A layout of the checkpoints of encoders; the heads that stand on them are left where they are.

    `prefix` begins the names of the encoder's tensors where it was saved with a head. `reads` are the keys of its
    config.json that `configure` knows.
    """

    derived = HEADS
    prefix: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]]

    def layout(self, config: Any) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """How the tensors of this encoder are named."""
        return self

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> Any:
        """The encoder of a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    @abstractmethod
    def describe(self, config: Any) -> dict[str, Any]:
        """The config.json of an encoder; raises `Incompatible` naming what the layout cannot say."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """A fresh encoder."""

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """The names without the prefix."""
        return {name.removeprefix(self.prefix): name for name in names}

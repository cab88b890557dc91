"""A door for encoders: their config.json and the names of their tensors, both ways."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from attn_models.families.door import Layout

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# What is built on top of an encoder, by the names that transformers gives it.
HEADS = re.compile(r"^(pooler|cls|lm_head|classifier|qa_outputs|sequence_summary)\.|position_ids$")


class EncoderDoor(Layout):
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

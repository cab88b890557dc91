"""The model families of recurrent language models. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import ModelFamily

from attn_models.recurrent.config import KeyValueConfig, LstmnConfig, RecurrentConfig, TuringConfig, attention_of


class RecurrentFamily(ModelFamily):
    """Base class of families of recurrent language models: a subclass sets its `Config`."""

    Config: ClassVar[type[RecurrentConfig]]

    def configure(self, values: Mapping[str, Any]) -> RecurrentConfig:
        """The config from plain values; also raises the errors of `attention_of` for its mechanism."""
        config = self.Config.from_plain(values)
        attention_of(config)
        return config

    def build(self, config: RecurrentConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.recurrent.language_model import RecurrentLanguageModel

        return RecurrentLanguageModel(config)


class KeyValueFamily(RecurrentFamily):
    """An LSTM that attends to its last few outputs."""

    name = "key_value_lm"
    summary = "An LSTM language model that attends to keys and values of its last outputs (Daniluk et al. 2017)."
    Config = KeyValueConfig


class LstmnFamily(RecurrentFamily):
    """LSTMs that attend to the tapes of their earlier states."""

    name = "lstmn_lm"
    summary = "A language model of LSTMs that attend to all their earlier states (Cheng et al. 2016)."
    Config = LstmnConfig


class TuringFamily(RecurrentFamily):
    """The Neural Turing Machine, whose memory is addressed by content and location."""

    name = "turing_machine"
    summary = "A Neural Turing Machine over tokens (Graves et al. 2014)."
    Config = TuringConfig


def recurrent_families() -> list[ModelFamily]:
    """One instance of each recurrent family."""
    return [KeyValueFamily(), LstmnFamily(), TuringFamily()]

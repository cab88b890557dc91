"""Every law of language models in one class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attn_core import ModelFamily

from attn_testing.laws import model
from attn_testing.model_subject import ModelSubject, Values
from attn_testing.suite import Suite


class ModelSuite(Suite):
    """What a test class says of the models it tests: a `family`, by name or as an object, and `configs` by label.

    Configs are plain values of small models, with a context of at least 13 tokens.
    """

    family: ClassVar[str | ModelFamily]
    configs: ClassVar[Mapping[str, Values]]

    @classmethod
    def make_subject(cls) -> ModelSubject:
        """The family and its configs."""
        return ModelSubject(cls.family, cls.configs)


class ModelLaws(
    ModelSuite,
    model.Described,
    model.Causality,
    model.StepEqualsForward,
    model.CrowdEqualsAlone,
    model.GreedyTokensOfLogits,
    model.SavedAndLoaded,
):
    """Every law. A model's test file inherits this, names its family and gives small configs."""

    laws = model.MODEL_LAWS

"""Every law of mechanisms in one class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attn_core import Mechanism

from attn_testing import laws
from attn_testing.laws import MECHANISM_LAWS
from attn_testing.subject import SETTINGS, Setting, Subject
from attn_testing.suite import Suite


class MechanismSuite(Suite):
    """What a test class says of the mechanism it tests; inherit it with single laws, or `MechanismLaws` for all.

    `mechanism` is a name or an object; `options` are its own; `settings` are what models may tell it.
    """

    mechanism: ClassVar[str | Mechanism]
    options: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Sequence[Setting]] = SETTINGS

    @classmethod
    def make_subject(cls) -> Subject:
        """The mechanism with its options and settings."""
        return Subject(cls.mechanism, cls.options, cls.settings)

    @classmethod
    def reported(cls) -> str:
        """The mechanism's own name."""
        return str(cls.subject().mechanism.name)


class MechanismLaws(
    MechanismSuite,
    laws.Described,
    laws.Options,
    laws.Settings,
    laws.Undeclared,
    laws.RowSums,
    laws.CausalityByPerturbation,
    laws.CausalityByGradient,
    laws.Bidirectionality,
    laws.PaddingInvariance,
    laws.NoAllowedKey,
    laws.DecodeEqualsForward,
    laws.ChunkedPrefill,
    laws.BatchInvariance,
    laws.TreeEqualsPaths,
    laws.Borrowing,
    laws.DroppedWeights,
    laws.Gradients,
    laws.Precision,
    laws.StateBytes,
    laws.DeclaredCost,
    laws.SavedAndLoaded,
    laws.Compiles,
):
    """Every law. A plugin's test file inherits this and names its mechanism."""

    laws = MECHANISM_LAWS

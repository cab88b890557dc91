"""Mechanisms broken on purpose: each breaks one law and keeps all others, which proves that the law bites."""

from __future__ import annotations

from collections.abc import Mapping

from attn_core import Mechanism

from attn_testing import laws
from attn_testing.broken import borrowing, dropping, forward, labels, numbers, padding, steps
from attn_testing.law import MechanismLaw

BROKEN: Mapping[type[MechanismLaw], Mechanism] = {
    laws.Described: labels.NoEquation(),
    laws.Options: labels.Unchecked(),
    laws.Settings: labels.RefusesGroups(),
    laws.Undeclared: padding.IgnoredMask(),
    laws.RowSums: forward.Unnormalised(),
    laws.CausalityByPerturbation: forward.LargeLeak(),
    laws.CausalityByGradient: forward.GradientLeak(),
    laws.Bidirectionality: forward.NeverAhead(),
    laws.PaddingInvariance: padding.LateMask(),
    laws.NoAllowedKey: forward.UniformWhenBlind(),
    laws.DecodeEqualsForward: steps.UnscaledStep(),
    laws.ChunkedPrefill: steps.TopLeft(),
    laws.BatchInvariance: padding.Rubbish(),
    laws.TreeEqualsPaths: steps.Orphan(),
    laws.Borrowing: borrowing.FirstRequest(),
    laws.DroppedWeights: dropping.AlwaysDrops(),
    laws.Gradients: numbers.WrongBackward(),
    laws.Precision: numbers.Widens(),
    laws.StateBytes: steps.OverstatedState(),
    laws.DeclaredCost: labels.Cheap(),
    laws.SavedAndLoaded: numbers.HiddenWeight(),
    laws.Compiles: numbers.LooksInside(),
}
"""The mechanism that breaks each law."""

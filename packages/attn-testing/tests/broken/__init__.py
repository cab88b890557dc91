"""Mechanisms broken on purpose: each breaks one law and keeps all others, which tests that the law detects faults."""

from __future__ import annotations

from collections.abc import Mapping

from attn_core import Mechanism

from attn_testing import laws
from attn_testing.law import MechanismLaw
from broken import mechanisms, ordinary, quiet, recurrent, sizes, sound, sources, unseen

BROKEN: Mapping[type[MechanismLaw], Mechanism] = {
    laws.Described: mechanisms.NoEquation(),
    laws.Options: mechanisms.Unchecked(),
    laws.EveryOptionActs: unseen.Idle(),
    laws.Settings: mechanisms.RefusesGroups(),
    laws.Undeclared: mechanisms.IgnoredMask(),
    laws.Abilities: ordinary.IgnoresLengths(),
    laws.RowSums: mechanisms.Unnormalised(),
    laws.WeightsOfOutput: unseen.Unrelated(),
    laws.CausalityByPerturbation: mechanisms.LargeLeak(),
    laws.CausalityByGradient: mechanisms.GradientLeak(),
    laws.Bidirectionality: mechanisms.NeverAhead(),
    laws.PaddingInvariance: mechanisms.LateMask(),
    laws.NoAllowedKey: mechanisms.UniformWhenBlind(),
    laws.DecodeEqualsForward: mechanisms.UnscaledStep(),
    laws.ChunkedPrefill: mechanisms.TopLeft(),
    laws.BatchInvariance: mechanisms.Rubbish(),
    laws.TreeEqualsPaths: mechanisms.Orphan(),
    laws.KVSharing: sound.FirstRequest(),
    laws.DroppedWeights: sound.AlwaysDrops(),
    laws.Training: unseen.LouderInTraining(),
    laws.Gradients: mechanisms.WrongBackward(),
    laws.Precision: mechanisms.Widens(),
    laws.StateBytes: mechanisms.OverstatedState(),
    laws.Cost: mechanisms.Cheap(),
    laws.StepCost: mechanisms.Forgetful(),
    laws.SavedAndLoaded: mechanisms.HiddenWeight(),
    laws.MicroBatches: ordinary.SummedLoss(),
    laws.Recomputation: ordinary.KeptLoss(),
    laws.Copied: ordinary.KeepsGraph(),
    laws.PaddingInFront: ordinary.InChunks(),
    laws.KernelNames: ordinary.AnyKernel(),
    laws.NoSequences: ordinary.FirstSequence(),
    laws.OnMeta: ordinary.OnTheHost(),
    laws.HeadSplit: sound.HeadsMeet(),
    laws.Equation: quiet.WrongScale(),
    laws.Purity: quiet.ReusesOutput(),
    laws.Devices: quiet.OnHost(),
    laws.StatesAreRead: quiet.Spare(),
    laws.Preemption: quiet.Restarts(),
    laws.StepPrecision: quiet.RoundsState(),
    laws.Compiles: mechanisms.LooksInside(),
}
"""For each law a mechanism that breaks it, and no other law."""

ALSO_BROKEN: tuple[tuple[type[MechanismLaw], Mechanism], ...] = (
    (laws.Training, unseen.NoNumberInTraining()),
    (laws.CausalityByGradient, unseen.LeaksInTraining()),
    (laws.CausalityByPerturbation, unseen.LeaksInTraining()),
    (laws.CausalityByPerturbation, unseen.LeaksFar()),
    (laws.DecodeEqualsForward, unseen.Forgets()),
    (laws.BatchInvariance, unseen.LargeBatch()),
    (laws.BatchInvariance, unseen.Crowded()),
    (laws.NoAllowedKey, sources.SeesUnreal()),
    (laws.Settings, unseen.Without()),
    (laws.Settings, unseen.WithoutGroups()),
    (laws.Settings, unseen.WithoutHeadSize()),
    (laws.Settings, unseen.WithoutRotary()),
    (laws.Described, unseen.Unwritable()),
    (laws.Cost, unseen.Free()),
    (laws.StepCost, unseen.Paid()),
)
"""Further laws with a mechanism that breaks them; it may break other laws too."""

QUIET: tuple[tuple[type[MechanismLaw], Mechanism], ...] = (
    (laws.Equation, quiet.WrongScale()),
    (laws.Equation, quiet.UndeclaredBias()),
    (laws.Equation, recurrent.WrongSpecScale()),
    (laws.Equation, recurrent.OtherEquation()),
    (laws.Devices, quiet.OnHost()),
    (laws.Devices, quiet.StepOnHost()),
    (laws.Devices, recurrent.SumsOnHost()),
    (laws.Purity, quiet.LongestSoFar()),
    (laws.Purity, quiet.Numbered()),
    (laws.Purity, quiet.PythonNoise()),
    (laws.Purity, quiet.Reseeds()),
    (laws.Purity, quiet.CountsCalls()),
    (laws.Purity, quiet.SpendsInput()),
    (laws.Purity, quiet.SpendsRows()),
    (laws.Purity, quiet.ReusesOutput()),
    (laws.Purity, quiet.ReturnsInput()),
    (laws.Purity, quiet.FasterBlind()),
    (laws.Purity, quiet.AssumesStrides()),
    (laws.StatesAreRead, quiet.Spare()),
    (laws.StatesAreRead, sizes.KeepsMore()),
    (laws.StatesAreRead, recurrent.TwoSums()),
    (laws.PaddingInvariance, quiet.CommonMask()),
    (laws.PaddingInvariance, quiet.CommonNorm()),
    (laws.Gradients, quiet.LosesGradientFar()),
    (laws.Gradients, quiet.LosesGradientInTraining()),
    (laws.Gradients, recurrent.CutsGradient()),
    (laws.Cost, sizes.Bulk()),
    (laws.Cost, sizes.FlatRate()),
    (laws.Cost, recurrent.CostlyForward()),
    (laws.StepCost, sizes.FlatStep()),
    (laws.ChunkedPrefill, quiet.FutureInChunks()),
    (laws.Preemption, quiet.Restarts()),
    (laws.Preemption, quiet.Shortcut()),
    (laws.Preemption, recurrent.OnLayer()),
    (laws.Precision, quiet.RoundsFar()),
    (laws.StepPrecision, quiet.RoundsState()),
    (laws.BatchInvariance, quiet.SwapsMiddle()),
    (laws.DecodeEqualsForward, sizes.OffByOne()),
    (laws.DecodeEqualsForward, recurrent.ForgetsSeam()),
)
"""Laws with mechanisms of which no single short call shows the fault; these may break other laws, too."""

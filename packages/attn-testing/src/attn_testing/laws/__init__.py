"""The laws of mechanisms; those of kernels, caches and models are in `kernel`, `caches` and `models`."""

from __future__ import annotations

from attn_testing.law import MechanismLaw
from attn_testing.laws.attention_weights import (
    DroppedWeights,
    NoAllowedKey,
    PaddingInvariance,
    RowSums,
    WeightsOfOutput,
)
from attn_testing.laws.causality import Bidirectionality, CausalityByGradient, CausalityByPerturbation
from attn_testing.laws.declarations import Abilities, Described, Settings, Undeclared
from attn_testing.laws.decoding import BatchInvariance, ChunkedPrefill, DecodeEqualsForward, StateBytes, TreeEqualsPaths
from attn_testing.laws.equation import Equation
from attn_testing.laws.kv_sharing import KVSharing
from attn_testing.laws.numerics import Compiles, Gradients, Precision, SavedAndLoaded, Training
from attn_testing.laws.options import EveryOptionActs, Options
from attn_testing.laws.ordinary_use import Copied, KernelNames, NoSequences, OnMeta, PaddingInFront
from attn_testing.laws.passes import MicroBatches, Recomputation
from attn_testing.laws.prices import Cost, StepCost
from attn_testing.laws.purity import Devices, Purity
from attn_testing.laws.resuming import Preemption, StatesAreRead, StepPrecision
from attn_testing.laws.splitting import HeadSplit

MECHANISM_LAWS: tuple[type[MechanismLaw], ...] = (
    Abilities,
    Described,
    Options,
    EveryOptionActs,
    Settings,
    Undeclared,
    RowSums,
    WeightsOfOutput,
    CausalityByPerturbation,
    CausalityByGradient,
    Bidirectionality,
    PaddingInvariance,
    NoAllowedKey,
    DecodeEqualsForward,
    ChunkedPrefill,
    BatchInvariance,
    TreeEqualsPaths,
    KVSharing,
    DroppedWeights,
    Gradients,
    Training,
    MicroBatches,
    Recomputation,
    Precision,
    StateBytes,
    Cost,
    StepCost,
    SavedAndLoaded,
    Copied,
    PaddingInFront,
    KernelNames,
    NoSequences,
    OnMeta,
    HeadSplit,
    Equation,
    Purity,
    Devices,
    StatesAreRead,
    Preemption,
    StepPrecision,
    Compiles,
)

__all__ = [
    "MECHANISM_LAWS",
    "Abilities",
    "BatchInvariance",
    "Bidirectionality",
    "CausalityByGradient",
    "CausalityByPerturbation",
    "ChunkedPrefill",
    "Compiles",
    "Copied",
    "Cost",
    "DecodeEqualsForward",
    "Described",
    "Devices",
    "DroppedWeights",
    "Equation",
    "EveryOptionActs",
    "Gradients",
    "HeadSplit",
    "KVSharing",
    "KernelNames",
    "MechanismLaw",
    "MicroBatches",
    "NoAllowedKey",
    "NoSequences",
    "OnMeta",
    "Options",
    "PaddingInFront",
    "PaddingInvariance",
    "Precision",
    "Preemption",
    "Purity",
    "Recomputation",
    "RowSums",
    "SavedAndLoaded",
    "Settings",
    "StateBytes",
    "StatesAreRead",
    "StepCost",
    "StepPrecision",
    "Training",
    "TreeEqualsPaths",
    "Undeclared",
    "WeightsOfOutput",
]

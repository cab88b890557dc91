"""The laws, one a file."""

from __future__ import annotations

from attn_testing.law import MechanismLaw
from attn_testing.laws.batch_invariance import BatchInvariance
from attn_testing.laws.bidirectionality import Bidirectionality
from attn_testing.laws.borrowing import Borrowing
from attn_testing.laws.causality_by_gradient import CausalityByGradient
from attn_testing.laws.causality_by_perturbation import CausalityByPerturbation
from attn_testing.laws.chunked_prefill import ChunkedPrefill
from attn_testing.laws.compiles import Compiles
from attn_testing.laws.cost import DeclaredCost
from attn_testing.laws.decode_equals_forward import DecodeEqualsForward
from attn_testing.laws.described import Described
from attn_testing.laws.dropped_weights import DroppedWeights
from attn_testing.laws.gradients import Gradients
from attn_testing.laws.no_allowed_key import NoAllowedKey
from attn_testing.laws.options import Options
from attn_testing.laws.padding_invariance import PaddingInvariance
from attn_testing.laws.precision import Precision
from attn_testing.laws.row_sums import RowSums
from attn_testing.laws.saved_and_loaded import SavedAndLoaded
from attn_testing.laws.settings import Settings
from attn_testing.laws.state_bytes import StateBytes
from attn_testing.laws.tree_equals_paths import TreeEqualsPaths
from attn_testing.laws.undeclared import Undeclared

MECHANISM_LAWS: tuple[type[MechanismLaw], ...] = (
    Described,
    Options,
    Settings,
    Undeclared,
    RowSums,
    CausalityByPerturbation,
    CausalityByGradient,
    Bidirectionality,
    PaddingInvariance,
    NoAllowedKey,
    DecodeEqualsForward,
    ChunkedPrefill,
    BatchInvariance,
    TreeEqualsPaths,
    Borrowing,
    DroppedWeights,
    Gradients,
    Precision,
    StateBytes,
    DeclaredCost,
    SavedAndLoaded,
    Compiles,
)

__all__ = [
    "MECHANISM_LAWS",
    "BatchInvariance",
    "Bidirectionality",
    "Borrowing",
    "CausalityByGradient",
    "CausalityByPerturbation",
    "ChunkedPrefill",
    "Compiles",
    "DeclaredCost",
    "DecodeEqualsForward",
    "Described",
    "DroppedWeights",
    "Gradients",
    "MechanismLaw",
    "NoAllowedKey",
    "Options",
    "PaddingInvariance",
    "Precision",
    "RowSums",
    "SavedAndLoaded",
    "Settings",
    "StateBytes",
    "TreeEqualsPaths",
    "Undeclared",
]

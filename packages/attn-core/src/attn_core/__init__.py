"""The contract of attn: what a mechanism, kernel, cache and model are, and how plugins are found. No torch."""

from attn_core.batch import Fields, LayerState, ModelState, PagedView, RaggedBatch, Rows, SlotView, SourceView, Span
from attn_core.capability import Capability
from attn_core.catalog import Catalog, installed
from attn_core.config import MechanismConfig, configure, option_fields
from attn_core.cost import Cost, Shape
from attn_core.declared import DeclaredMechanism
from attn_core.dispatch import Verdict, choose, explain
from attn_core.distribution import (
    AdaptiveEntmax,
    Distribution,
    Entmax,
    Hard,
    LocalGaussian,
    Sigmoid,
    Softmax,
    SoftmaxOne,
    SoftmaxWithSink,
    Sparsemax,
)
from attn_core.heads import Heads
from attn_core.hooks import Command, Finding, hookimpl
from attn_core.inner import Attend, InnerAttention
from attn_core.kernel import Anything, AtMost, Condition, Kernel, MultipleOf, OneOf, Operands
from attn_core.loader import PluginRecord, PluginStatus
from attn_core.mask import Causal, Full, Mask, Predicate, Prefix, Window
from attn_core.mechanism import AttentionLayer, ComputedMechanism, Mechanism, Paper
from attn_core.model import LanguageModel, ModelFamily, ModelShape, SourceModel, Tokenizer
from attn_core.modifier import (
    Alibi,
    Modifier,
    RelativeBias,
    RelativeKeys,
    RelativeValues,
    ScoreFunction,
    SoftCap,
    T5Bias,
)
from attn_core.norm import QkNorm
from attn_core.part import Part
from attn_core.problem import Problem, attend_problem
from attn_core.registry import Registry
from attn_core.rotary import (
    DynamicNtk,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Rotary,
    RotaryScaling,
    Yarn,
    rotary_scaling,
)
from attn_core.score import Additive, Concat, Cosine, Dot, General, Location, ScaledDot, Score
from attn_core.spec import AttentionSpec
from attn_core.state import Field, Paged, Slot, Source, StateSpec, StateSpecs, state_bytes
from attn_core.store import CacheFamily, ModelSpecs, StateStore, StoreSize, Usage

__all__ = [
    "AdaptiveEntmax",
    "Additive",
    "Alibi",
    "Anything",
    "AtMost",
    "Attend",
    "AttentionLayer",
    "AttentionSpec",
    "CacheFamily",
    "Capability",
    "Catalog",
    "Causal",
    "Command",
    "ComputedMechanism",
    "Concat",
    "Condition",
    "Cosine",
    "Cost",
    "DeclaredMechanism",
    "Distribution",
    "Dot",
    "DynamicNtk",
    "Entmax",
    "Field",
    "Fields",
    "Finding",
    "Full",
    "General",
    "Hard",
    "Heads",
    "InnerAttention",
    "Kernel",
    "LanguageModel",
    "LayerState",
    "LinearScaling",
    "Llama3Scaling",
    "LocalGaussian",
    "Location",
    "LongRope",
    "Mask",
    "Mechanism",
    "MechanismConfig",
    "ModelFamily",
    "ModelShape",
    "ModelSpecs",
    "ModelState",
    "Modifier",
    "MultipleOf",
    "OneOf",
    "Operands",
    "Paged",
    "PagedView",
    "Paper",
    "Part",
    "PluginRecord",
    "PluginStatus",
    "Predicate",
    "Prefix",
    "Problem",
    "QkNorm",
    "RaggedBatch",
    "Registry",
    "RelativeBias",
    "RelativeKeys",
    "RelativeValues",
    "Rotary",
    "RotaryScaling",
    "Rows",
    "ScaledDot",
    "Score",
    "ScoreFunction",
    "Shape",
    "Sigmoid",
    "Slot",
    "SlotView",
    "SoftCap",
    "Softmax",
    "SoftmaxOne",
    "SoftmaxWithSink",
    "Source",
    "SourceModel",
    "SourceView",
    "Span",
    "Sparsemax",
    "StateSpec",
    "StateSpecs",
    "StateStore",
    "StoreSize",
    "T5Bias",
    "Tokenizer",
    "Usage",
    "Verdict",
    "Window",
    "Yarn",
    "attend_problem",
    "choose",
    "configure",
    "explain",
    "hookimpl",
    "installed",
    "option_fields",
    "rotary_scaling",
    "state_bytes",
]

"""The contract of attn: what a mechanism, kernel, cache and model are, and how plugins are found. No torch."""

from attn_core.batch import Fields, LayerState, ModelState, PagedView, RaggedBatch, Rows, SlotView, SourceView, Span
from attn_core.capability import Capability
from attn_core.catalog import Catalog, installed
from attn_core.config import MechanismConfig, configure, option_fields
from attn_core.cost import Cost, Shape
from attn_core.declared import DeclaredMechanism
from attn_core.dispatch import Verdict, choose, explain
from attn_core.distribution import Distribution, Softmax, Sparsemax
from attn_core.heads import Heads
from attn_core.hooks import Command, Finding, hookimpl
from attn_core.inner import Attend, InnerAttention
from attn_core.kernel import Anything, AtMost, Condition, Kernel, MultipleOf, OneOf, Operands
from attn_core.loader import PluginRecord, PluginStatus
from attn_core.mask import Causal, Full, Mask, Predicate, Prefix, Window
from attn_core.mechanism import AttentionLayer, ComputedMechanism, Mechanism, Paper
from attn_core.model import LanguageModel, ModelFamily, ModelShape, SourceModel, Tokenizer
from attn_core.problem import Problem, attend_problem
from attn_core.registry import Registry
from attn_core.score import Additive, Alibi, General, Modifier, Rotary, ScaledDot, Score, ScoreFunction, SoftCap
from attn_core.spec import AttentionSpec
from attn_core.state import Field, Paged, Slot, Source, StateSpec, StateSpecs, state_bytes
from attn_core.store import CacheFamily, ModelSpecs, StateStore, StoreSize, Usage

__all__ = [
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
    "Condition",
    "Cost",
    "DeclaredMechanism",
    "Distribution",
    "Field",
    "Fields",
    "Finding",
    "Full",
    "General",
    "Heads",
    "InnerAttention",
    "Kernel",
    "LanguageModel",
    "LayerState",
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
    "PluginRecord",
    "PluginStatus",
    "Predicate",
    "Prefix",
    "Problem",
    "RaggedBatch",
    "Registry",
    "Rotary",
    "Rows",
    "ScaledDot",
    "Score",
    "ScoreFunction",
    "Shape",
    "Slot",
    "SlotView",
    "SoftCap",
    "Softmax",
    "Source",
    "SourceModel",
    "SourceView",
    "Span",
    "Sparsemax",
    "StateSpec",
    "StateSpecs",
    "StateStore",
    "StoreSize",
    "Tokenizer",
    "Usage",
    "Verdict",
    "Window",
    "attend_problem",
    "choose",
    "configure",
    "explain",
    "hookimpl",
    "installed",
    "option_fields",
    "state_bytes",
]

"""The contract of attn: the interfaces of mechanisms, kernels, caches and models, and plugin discovery, without torch.

This package exports what most plugins need; the rest is in its submodules: `masks`, `scores`, `modifiers`,
`distributions`, `rotary`, `norms`, `kernels`, `states`, `stores`, `batch`, `models`, `plugins`, `errors`, `checks`.
"""

from attn_core.batch import Fields, LayerState, RaggedBatch
from attn_core.computation import Computation
from attn_core.config import MechanismConfig
from attn_core.cost import Cost, Shape, Step
from attn_core.declared import DeclaredMechanism
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_core.heads import Heads
from attn_core.inner import Attend, InnerAttention
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel
from attn_core.masks.bands import Causal, Full, Window
from attn_core.masks.base import Mask
from attn_core.mechanism import AttentionLayer, Capability, ComputedMechanism, Mechanism, Paper
from attn_core.models import ModelFamily
from attn_core.options import configure
from attn_core.plugins.catalog import installed
from attn_core.plugins.hooks import hookimpl
from attn_core.rotary import Rotary
from attn_core.spec import AttentionSpec
from attn_core.states import Field, Paged, Slot, Source, StateSpec, StateSpecs, state_bytes
from attn_core.stores import CacheFamily

__all__ = [
    "Attend",
    "AttentionInputs",
    "AttentionLayer",
    "AttentionSpec",
    "CacheFamily",
    "Capability",
    "Causal",
    "Computation",
    "ComputedMechanism",
    "Cost",
    "DeclaredMechanism",
    "Field",
    "Fields",
    "Full",
    "Heads",
    "Incompatible",
    "InnerAttention",
    "InvalidValue",
    "Kernel",
    "LayerState",
    "Mask",
    "Mechanism",
    "MechanismConfig",
    "ModelFamily",
    "Paged",
    "Paper",
    "RaggedBatch",
    "Rotary",
    "Shape",
    "Slot",
    "Source",
    "StateSpec",
    "StateSpecs",
    "Step",
    "UnknownName",
    "Window",
    "configure",
    "hookimpl",
    "installed",
    "state_bytes",
]

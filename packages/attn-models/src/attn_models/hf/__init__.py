"""attn in Hugging Face's transformers: models of any mechanism, and mechanisms as attention implementations.

Importing this package registers the configs and models with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained(folder)` loads a folder that `attn train` wrote. No code comes from the folder.
"""

from attn_core.errors import MissingPackage

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
except ImportError as error:
    raise MissingPackage.of("transformers", "running mechanisms inside it") from error

from attn_models.hf.attention import (
    MechanismAttention,
    materialised_mask,
    read_mask,
    register,
    register_mechanism,
)
from attn_models.hf.cache import StateCache
from attn_models.hf.models import (
    AttnConfig,
    AttnForCausalLM,
    AttnForSequenceClassification,
    AttnModel,
)
from attn_models.hf.replacement import Replaced, replace

AutoConfig.register(AttnConfig.model_type, AttnConfig, exist_ok=True)
for _auto, _model in (
    (AutoModel, AttnModel),
    (AutoModelForCausalLM, AttnForCausalLM),
    (AutoModelForSequenceClassification, AttnForSequenceClassification),
):
    _auto.register(AttnConfig, _model, exist_ok=True)

__all__ = [
    "AttnConfig",
    "AttnForCausalLM",
    "AttnForSequenceClassification",
    "AttnModel",
    "MechanismAttention",
    "Replaced",
    "StateCache",
    "materialised_mask",
    "read_mask",
    "register",
    "register_mechanism",
    "replace",
]

"""attn in Hugging Face's transformers: models of any mechanism, and mechanisms as attention implementations.

Importing this package registers the configs and models with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained(folder)` loads a folder that `attn train` wrote. No code comes from the folder.
"""

from attn_core.errors import MissingPackage

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
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
from attn_models.hf.encoders import (
    AttnEncoderConfig,
    AttnEncoderForSequenceClassification,
    AttnEncoderModel,
    AttnForMaskedLM,
    AttnForTokenClassification,
)
from attn_models.hf.models import (
    AttnConfig,
    AttnForCausalLM,
    AttnForSequenceClassification,
    AttnModel,
)
from attn_models.hf.replacement import Replaced, replace
from attn_models.hf.seq2seq import AttnForSeq2SeqLM, AttnSeq2SeqConfig

for _config in (AttnConfig, AttnEncoderConfig, AttnSeq2SeqConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
for _auto, _model in (
    (AutoModel, AttnModel),
    (AutoModelForCausalLM, AttnForCausalLM),
    (AutoModelForSequenceClassification, AttnForSequenceClassification),
    (AutoModel, AttnEncoderModel),
    (AutoModelForMaskedLM, AttnForMaskedLM),
    (AutoModelForTokenClassification, AttnForTokenClassification),
    (AutoModelForSequenceClassification, AttnEncoderForSequenceClassification),
    (AutoModelForSeq2SeqLM, AttnForSeq2SeqLM),
):
    _auto.register(_model.config_class, _model, exist_ok=True)

__all__ = [
    "AttnConfig",
    "AttnEncoderConfig",
    "AttnEncoderForSequenceClassification",
    "AttnEncoderModel",
    "AttnForCausalLM",
    "AttnForMaskedLM",
    "AttnForSeq2SeqLM",
    "AttnForSequenceClassification",
    "AttnForTokenClassification",
    "AttnModel",
    "AttnSeq2SeqConfig",
    "MechanismAttention",
    "Replaced",
    "StateCache",
    "materialised_mask",
    "read_mask",
    "register",
    "register_mechanism",
    "replace",
]

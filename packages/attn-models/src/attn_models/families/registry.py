"""State dict adapters by the `model_type` of a config.json."""

from __future__ import annotations

from attn_core.errors import UnknownName

from attn_models.families.adapter import EncoderAdapter, StateDictAdapter
from attn_models.families.bert import BertAdapter, BigBirdAdapter, LongformerAdapter
from attn_models.families.deepseek import DeepseekV2Adapter, DeepseekV3Adapter
from attn_models.families.gemma import Gemma2Adapter, Gemma3Adapter
from attn_models.families.gpt2 import Gpt2Adapter
from attn_models.families.llama import LlamaAdapter, MistralAdapter, MixtralAdapter
from attn_models.families.native import NativeAdapter, NativeEncoderAdapter
from attn_models.families.qwen3 import Qwen3Adapter, Qwen3NextAdapter
from attn_models.families.reformer import ReformerAdapter

ADAPTERS: dict[str, StateDictAdapter] = {
    adapter.model_type: adapter
    for adapter in (
        NativeAdapter(),
        LlamaAdapter(),
        MistralAdapter(),
        MixtralAdapter(),
        Gpt2Adapter(),
        Qwen3Adapter(),
        Qwen3NextAdapter(),
        Gemma2Adapter(),
        Gemma3Adapter(),
        DeepseekV2Adapter(),
        DeepseekV3Adapter(),
    )
}


def decoder_adapter(model_type: object) -> StateDictAdapter:
    """The adapter of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ADAPTERS:
        raise UnknownName.of("model_type of a config.json", str(model_type), ADAPTERS)
    return ADAPTERS[model_type]


ENCODER_ADAPTERS: dict[str, EncoderAdapter] = {
    adapter.model_type: adapter
    for adapter in (NativeEncoderAdapter(), BertAdapter(), LongformerAdapter(), BigBirdAdapter(), ReformerAdapter())
}


def encoder_adapter(model_type: object) -> EncoderAdapter:
    """The adapter of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ENCODER_ADAPTERS:
        raise UnknownName.of("model_type of an encoder", str(model_type), ENCODER_ADAPTERS)
    return ENCODER_ADAPTERS[model_type]

"""State dict adapters by the `model_type` of a config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_core.errors import Incompatible, UnknownName, near_names

from attn_models.adapters.base import EncoderAdapter, EncoderDecoderAdapter, StateDictAdapter
from attn_models.adapters.bert import (
    BertAdapter,
    BigBirdAdapter,
    CamembertAdapter,
    LongformerAdapter,
    RobertaAdapter,
    XlmRobertaAdapter,
)
from attn_models.adapters.deepseek import DeepseekV2Adapter, DeepseekV3Adapter
from attn_models.adapters.distilbert import DistilBertAdapter
from attn_models.adapters.gemma import Gemma2Adapter, Gemma3Adapter
from attn_models.adapters.gpt2 import Gpt2Adapter
from attn_models.adapters.llama import LlamaAdapter, MistralAdapter, MixtralAdapter
from attn_models.adapters.modernbert import ModernBertAdapter
from attn_models.adapters.native import LAYOUTS, NativeAdapter, NativeEncoderAdapter, NativeVitAdapter
from attn_models.adapters.qwen3 import Qwen3Adapter, Qwen3NextAdapter
from attn_models.adapters.reformer import ReformerAdapter
from attn_models.adapters.t5 import Mt5Adapter, T5Adapter
from attn_models.adapters.vit import VitAdapter
from attn_models.encoder.config import ReformerConfig, VisionConfig

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
        raise unknown_family("model_type of a config.json", model_type, ADAPTERS)
    return ADAPTERS[model_type]


def unknown_family(kind: str, model_type: object, known: Iterable[str]) -> UnknownName:
    """The error for a `model_type` without a layout: all that there are, as names alike are no families alike."""
    names = sorted(known)
    message = f"unknown {kind} {str(model_type)!r}; known: {', '.join(names)}"
    return UnknownName(message, kind=kind, name=str(model_type), near=", ".join(near_names(str(model_type), names)))


ENCODER_ADAPTERS: dict[str, EncoderAdapter] = {
    adapter.model_type: adapter
    for adapter in (
        NativeEncoderAdapter(),
        BertAdapter(),
        RobertaAdapter(),
        XlmRobertaAdapter(),
        CamembertAdapter(),
        DistilBertAdapter(),
        ModernBertAdapter(),
        LongformerAdapter(),
        BigBirdAdapter(),
        ReformerAdapter(),
    )
}


def encoder_adapter(model_type: object) -> EncoderAdapter:
    """The adapter of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ENCODER_ADAPTERS:
        raise unknown_family("model_type of an encoder", model_type, ENCODER_ADAPTERS)
    return ENCODER_ADAPTERS[model_type]


def encoder_adapter_for(config: Any) -> EncoderAdapter:
    """The layout in which an encoder with a head is kept: BERT's where that can say it, else ours; the Reformer's own.

    Raises `Incompatible` for a Reformer that its layout cannot say.
    """
    if isinstance(config, ReformerConfig):
        ENCODER_ADAPTERS[ReformerAdapter.model_type].to_hf_config(config)
        return ENCODER_ADAPTERS[ReformerAdapter.model_type]
    try:
        ENCODER_ADAPTERS[BertAdapter.model_type].to_hf_config(config)
    except Incompatible:
        return ENCODER_ADAPTERS[NativeEncoderAdapter.model_type]
    return ENCODER_ADAPTERS[BertAdapter.model_type]


ENCODER_DECODER_ADAPTERS: dict[str, EncoderDecoderAdapter] = {
    adapter.model_type: adapter for adapter in (T5Adapter(), Mt5Adapter())
}


def encoder_decoder_adapter(model_type: object) -> EncoderDecoderAdapter:
    """The adapter of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ENCODER_DECODER_ADAPTERS:
        raise unknown_family("model_type of an encoder-decoder", model_type, ENCODER_DECODER_ADAPTERS)
    return ENCODER_DECODER_ADAPTERS[model_type]


VIT_ADAPTERS: dict[str, VitAdapter] = {layout.model_type: layout for layout in (VitAdapter(), NativeVitAdapter())}


def vit_adapter(model_type: object) -> VitAdapter:
    """The layout of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in VIT_ADAPTERS:
        raise unknown_family("model_type of a model of images", model_type, VIT_ADAPTERS)
    return VIT_ADAPTERS[model_type]


def vit_adapter_for(config: VisionConfig) -> VitAdapter:
    """transformers' layout where it can say the model, else ours."""
    try:
        VIT_ADAPTERS[VitAdapter.model_type].to_hf_config(config, ())
    except Incompatible:
        return VIT_ADAPTERS[NativeVitAdapter.model_type]
    return VIT_ADAPTERS[VitAdapter.model_type]


def require_known_family(model_type: object) -> None:
    """Raise `UnknownName` for a `model_type` of a config.json that no layout here reads."""
    known = {*ADAPTERS, *ENCODER_ADAPTERS, *ENCODER_DECODER_ADAPTERS, *VIT_ADAPTERS, *LAYOUTS}
    if not isinstance(model_type, str) or model_type not in known:
        raise unknown_family("model_type of a config.json", model_type, known)

"""State dict adapters by the `model_type` of a config.json."""

from __future__ import annotations

from attn_core.errors import UnknownName

from attn_models.families.adapter import Door, EncoderDoor
from attn_models.families.bert import BertDoor, BigBirdDoor, LongformerDoor
from attn_models.families.deepseek import DeepseekV2Door, DeepseekV3Door
from attn_models.families.gemma import Gemma2Door, Gemma3Door
from attn_models.families.gpt2 import Gpt2Door
from attn_models.families.llama import LlamaDoor, MistralDoor, MixtralDoor
from attn_models.families.native import OwnDoor, OwnEncoderDoor
from attn_models.families.qwen3 import Qwen3Door, Qwen3NextDoor
from attn_models.families.reformer import ReformerDoor

DOORS: dict[str, Door] = {
    door.model_type: door
    for door in (
        OwnDoor(),
        LlamaDoor(),
        MistralDoor(),
        MixtralDoor(),
        Gpt2Door(),
        Qwen3Door(),
        Qwen3NextDoor(),
        Gemma2Door(),
        Gemma3Door(),
        DeepseekV2Door(),
        DeepseekV3Door(),
    )
}


def door_of(model_type: object) -> Door:
    """The door of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in DOORS:
        raise UnknownName.of("model_type of a config.json", str(model_type), DOORS)
    return DOORS[model_type]


ENCODER_DOORS: dict[str, EncoderDoor] = {
    door.model_type: door for door in (OwnEncoderDoor(), BertDoor(), LongformerDoor(), BigBirdDoor(), ReformerDoor())
}


def encoder_door_of(model_type: object) -> EncoderDoor:
    """The door of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ENCODER_DOORS:
        raise UnknownName.of("model_type of an encoder", str(model_type), ENCODER_DOORS)
    return ENCODER_DOORS[model_type]

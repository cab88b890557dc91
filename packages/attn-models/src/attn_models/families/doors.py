"""The layouts of checkpoints that can be read and written, by the word in their config.json."""

from __future__ import annotations

from attn_core.errors import UnknownName

from attn_models.families.deepseek import DeepseekV2Door, DeepseekV3Door
from attn_models.families.door import Door
from attn_models.families.gemma import Gemma2Door, Gemma3Door
from attn_models.families.gpt2 import Gpt2Door
from attn_models.families.llama import LlamaDoor
from attn_models.families.mistral import MistralDoor
from attn_models.families.mixtral import MixtralDoor
from attn_models.families.own import OwnDoor
from attn_models.families.qwen3 import Qwen3Door
from attn_models.families.qwen3_next import Qwen3NextDoor

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

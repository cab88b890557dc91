"""The layouts of encoders that can be read and written, by the word in their config.json."""

from __future__ import annotations

from attn_core.errors import UnknownName

from attn_models.families.bert import BertDoor
from attn_models.families.big_bird import BigBirdDoor
from attn_models.families.encoder_door import EncoderDoor
from attn_models.families.longformer import LongformerDoor
from attn_models.families.own_encoder import OwnEncoderDoor
from attn_models.families.reformer import ReformerDoor

ENCODER_DOORS: dict[str, EncoderDoor] = {
    door.model_type: door for door in (OwnEncoderDoor(), BertDoor(), LongformerDoor(), BigBirdDoor(), ReformerDoor())
}


def encoder_door_of(model_type: object) -> EncoderDoor:
    """The door of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in ENCODER_DOORS:
        raise UnknownName.of("model_type of an encoder", str(model_type), ENCODER_DOORS)
    return ENCODER_DOORS[model_type]

"""Encoders from folders and into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue

from attn_models.decoder.weightless import weightless
from attn_models.families.built import fill_constants, refuse_giants
from attn_models.families.encoder_doors import ENCODER_DOORS, encoder_door_of
from attn_models.families.keys import say_unread
from attn_models.families.own_encoder import OwnEncoderDoor
from attn_models.families.tensors import read_parameters, stored_tensors
from attn_models.packing.pack import require_unpacked
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, write_folder
from attn_models.weights.config_file import read_config


def is_encoder(folder: Path) -> bool:
    """Whether the config.json of a model folder is of an encoder; raises `CheckpointInvalid` where it is no JSON."""
    return read_config(folder / "config.json").get("model_type") in ENCODER_DOORS


def build_encoder(checkpoint: CheckpointFolder, dtype: torch.dtype) -> Any:
    """The encoder in a checkpoint folder, on the CPU.

    Raises `CheckpointInvalid` for a folder that does not fit the model, naming every tensor that is missing, extra or
    misshaped; `UnknownName` for another kind of model. Keys of its config.json that are not known are said.
    """
    path = checkpoint.path / "config.json"
    door = encoder_door_of(checkpoint.config.get("model_type"))
    try:
        say_unread(checkpoint.config, door.reads, path)
        config = door.configure(checkpoint.config)
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
    refuse_giants(checkpoint, config)
    with weightless():
        model = door.build(config)
    model.load_state_dict(read_parameters(checkpoint, door.layout(config), model.state_dict(), dtype), assign=True)
    if any(buffer.is_meta for buffer in model.buffers()):
        fill_constants(model, door.build(config))
    return model


def save_encoder(
    folder: str | Path, model: Any, tokenizer: Tokenizer | None = None, *, layout: str = OwnEncoderDoor.model_type
) -> Path:
    """Write an encoder as a checkpoint folder, replacing one already there, whole or not at all.

    `layout` is the `model_type` to write: ours says everything, the others are read by transformers too. Raises
    `Incompatible` for an encoder that the layout cannot say, `InvalidValue` for weights that are not finite,
    `CheckpointWriteFailed` where the file system fails, `WrongState` for one whose weights are packed.
    """
    require_unpacked(model, "weights packed as {} cannot be written; load the model without packing")
    door = encoder_door_of(layout)
    described = door.describe(model.config) | {"dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}
    files: dict[str, Any] = dict(tokenizer.files()) if tokenizer else {}
    return write_folder(folder, described, stored_tensors(model.state_dict(), door.layout(model.config)), files)

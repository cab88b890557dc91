"""Loading encoder-decoder models from checkpoint folders of transformers, and saving them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue

from attn_models.adapters.base import EncoderDecoderAdapter
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import ENCODER_DECODER_ADAPTERS, encoder_decoder_adapter
from attn_models.adapters.state_dict import (
    check_config_fits,
    fill_buffers,
    init_empty_weights,
    read_parameters,
    stored_tensors,
)
from attn_models.quantization.quantize import require_not_quantized
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, write_folder


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an encoder-decoder model of transformers."""
    return config.get("model_type") in ENCODER_DECODER_ADAPTERS


def build_encoder_decoder(checkpoint: CheckpointFolder, dtype: torch.dtype) -> Any:
    """The model in a checkpoint folder, on the device that the folder's tensors are read onto.

    Raises `CheckpointInvalid` for a folder that does not fit the model, naming every tensor that is missing, extra or
    misshaped, and for embeddings that differ where the model has one; `UnknownName` for another kind of model.
    """
    path = checkpoint.path / "config.json"
    adapter = encoder_decoder_adapter(checkpoint.config.get("model_type"))
    try:
        check_unread_keys(checkpoint.config, adapter.known_keys, path)
        config = adapter.without_missing(adapter.from_hf_config(checkpoint.config), checkpoint.tensors.entries)
        check_config_fits(checkpoint, config)
        with init_empty_weights():
            model = adapter.build(config)
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
    layout = adapter.layout(config)
    model.load_state_dict(read_parameters(checkpoint, layout, model.state_dict(), dtype), assign=True)
    require_one_table(checkpoint, adapter)
    if any(buffer.is_meta for buffer in model.buffers()):
        fill_buffers(model, adapter.build(config), checkpoint.tensors.device)
    return model


def require_one_table(checkpoint: CheckpointFolder, adapter: EncoderDecoderAdapter) -> None:
    """Raise `CheckpointInvalid` where a folder has embeddings of several names that differ."""
    first, *others = [name for name in adapter.tables if name in checkpoint.tensors.entries] or [""]
    for name in others:
        if not torch.equal(checkpoint.tensors[first], checkpoint.tensors[name]):
            raise CheckpointInvalid.of(checkpoint.path, f"{name!r} differs from {first!r}; the model has one embedding")


def save_encoder_decoder(folder: str | Path, model: Any, tokenizer: Tokenizer | None = None, *, layout: str) -> Path:
    """Write a model in a layout of transformers, such as "t5", as a checkpoint folder, replacing one already there.

    Raises `Incompatible` for a model that the layout cannot say, and as `save_encoder`.
    """
    require_not_quantized(model, "weights packed as {} cannot be written; load the model without packing")
    adapter = encoder_decoder_adapter(layout)
    described = adapter.to_hf_config(model.config) | {"dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}
    files: dict[str, Any] = dict(tokenizer.files()) if tokenizer else {}
    return write_folder(folder, described, stored_tensors(model.state_dict(), adapter.layout(model.config)), files)

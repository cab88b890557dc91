"""What if a model of transformers had another attention: its weights, with some layers' mechanisms exchanged."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from attn_core import Capability, installed
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import AttentionChoice, DecoderConfig
from torch import Tensor

from attn_models.adapters.state_dict import saved_parameters
from attn_models.conversion.heads import by_head
from attn_models.decoder.decoder import Decoder
from attn_models.hf.models import AttnConfig, AttnForCausalLM
from attn_models.loading import load_model


class Replaced(NamedTuple):
    """The model with the mechanism; the names of its parameters that were drawn, as nothing in the old model is exactly
    these, and of old ones that it has no place for; and whether the layers' rotary positions were left out, because the
    mechanism takes none."""

    model: AttnForCausalLM
    initialised: list[str]
    dropped: list[str]
    without_rotary: bool


def replace(model: Any, mechanism: str, *, layers: Iterable[int] | None = None, **options: Any) -> Replaced:
    """A copy of a causal language model of transformers whose layers, by default all, use a mechanism with `options`.

        model, initialised, *_ = attn_models.hf.replace(model, "sparsemax", layers=[0, 5])

    Weights are kept wherever the new layer has a parameter of the same name and shape. Where the mechanism needs a key
    and value head for each query head, those of the model are repeated, which computes the same. The copy generates,
    trains and is saved like any other `AttnForCausalLM`.

    Raises `Incompatible` for a model whose layout is not read as a `Decoder` and a mechanism that cannot be causal,
    `InvalidValue` for layers that do not exist, and the errors of `attn_models.loading.load_model` and of mechanisms.
    """
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        before = load_model(folder, str(model.dtype).removeprefix("torch.")).model
    if type(before) is not Decoder or type(before.config) is not DecoderConfig:
        raise Incompatible(f"a {type(model).__name__} is not read as a Decoder, so its attention cannot be replaced")
    config: DecoderConfig = before.config
    chosen = range(config.num_layers) if layers is None else list(layers)
    if not all(type(layer) is int and layer in range(config.num_layers) for layer in chosen):
        raise InvalidValue.of("layers", chosen, f"whole numbers from 0 to {config.num_layers - 1}")
    found = installed().mechanisms.get(mechanism)
    bare = config.positions == "rotary" and not found.can(Capability.ROTARY)
    if bare:
        options = {**options, "rotary": None}
    if config.num_kv_heads is not None and not found.can(Capability.GROUPED):
        options = {**options, "num_kv_heads": config.num_heads}
    choice = AttentionChoice(mechanism=mechanism, options=options)
    pattern = tuple(choice if layer in chosen else config.choice(layer) for layer in range(config.num_layers))
    ids = {name: getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    new = AttnForCausalLM(AttnConfig.of(dataclasses.replace(config, pattern=pattern), **ids)).to(model.dtype)
    old = saved_parameters(before)
    initialised, dropped = _filled(new.model, old), sorted(old.keys() - saved_parameters(new.model).keys())
    new.generation_config = copy.deepcopy(model.generation_config)
    return Replaced(new.to(model.device).train(model.training), initialised, dropped, bare)


@torch.no_grad()
def _filled(model: Decoder, old: dict[str, Tensor]) -> list[str]:
    """Copy the old parameters into a model; returns the names of those that no old one is."""
    initialised = []
    for name, parameter in saved_parameters(model).items():
        tensor = old.get(name)
        if tensor is not None and tensor.shape != parameter.shape and name.split(".")[-2] in ("key", "value"):
            groups, rest = divmod(len(parameter), len(tensor))
            heads = model.config.num_kv_heads or model.config.num_heads
            repeated = not rest and groups * heads == model.config.num_heads
            tensor = by_head(tensor, heads).repeat_interleave(groups, 0).flatten(0, 1) if repeated else tensor
        if tensor is None or tensor.shape != parameter.shape:
            initialised.append(name)
        else:
            parameter.copy_(tensor)
    return initialised

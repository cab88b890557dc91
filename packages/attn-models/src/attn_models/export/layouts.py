"""The published layout, such as Llama's or GPT-2's, that expresses a decoder exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.errors import Incompatible
from attn_schema.decoder import OWN_BIASES, DecoderConfig
from torch import Tensor

from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.native import NativeAdapter
from attn_models.adapters.registry import installed_adapters
from attn_models.adapters.state_dict import init_empty_weights, load_parameters, saved_parameters
from attn_models.decoder.decoder import Decoder
from attn_models.loading.models import in_layout

PREFERRED = ("llama", "mistral", "qwen3", "qwen2", "mixtral", "qwen3_moe", "gpt2", "gpt_neox", "gemma3_text", "gemma2")
"""The layouts that are tried first, as most programs read them; the others follow by name."""
NEAR = 1
"""The most fields in which a layout that an error names besides the closest one may differ."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Expressed:
    """A model in a published layout: the `model_type`, config.json and tensors of a folder that computes the same.

    `parameters` are the names of the parameters of our model that the tensors hold.
    """

    layout: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    parameters: Sequence[str]


def published(model: Any, layout: str | None = None) -> Expressed:
    """The model in a published layout: in the one given, else in the first that expresses it exactly.

    Biases that a layout has and the model lacks are written as zeros. Raises `Incompatible` if no layout expresses the
    model, naming the fields that differ from the closest layouts.
    """
    refusals: dict[str, Incompatible] = {}
    for each in [layout] if layout else _layouts(type(model.config)):
        for version in _versions(model):
            try:
                config, tensors = in_layout(version, each)
            except Incompatible as error:
                # With biases of zero the model may be closer: then what is left differs, not that it has none.
                refusals[each] = min(refusals.get(each, error), error, key=lambda said: len(_fields(said)))
            else:
                parameters = list(saved_parameters(version))
                return Expressed(layout=each, config=config, tensors=tensors, parameters=parameters)
    learned = getattr(model.config, "positions", None) == "learned"
    first = refusals.get("gpt2" if learned else "llama") or next(iter(refusals.values()), None)
    near = [error for error in refusals.values() if 0 < len(_fields(error)) <= NEAR]
    differing = [error.message for error in (first, *near) if error is not None]
    said = "; ".join(dict.fromkeys(differing)) or f"none is known for a {type(model.config).__name__}"
    raise Incompatible(f"no published layout expresses this model exactly: {said}")


def _fields(error: Incompatible) -> list[str]:
    """The fields by which a config differs; none where all fit, but not the mechanism or its options."""
    return str(error.metadata["fields"]).split(", ") if "fields" in error.metadata else []


def _layouts(config: type[Any]) -> list[str]:
    """The published layouts for configs of this class, in the order in which they are tried."""
    adapters = installed_adapters(StateDictAdapter)  # type: ignore[type-abstract]
    found = {name for name, each in adapters.items() if each.Config is config} - {NativeAdapter.model_type}
    return [name for name in PREFERRED if name in found] + sorted(found - set(PREFERRED))


def _versions(model: Any) -> Iterator[Any]:
    """The model, and for a decoder that lacks some biases the same model with biases of zero."""
    yield model
    config = model.config
    if type(model) is not Decoder or all(config.has_bias(name) for name in OWN_BIASES):
        return
    biased: DecoderConfig = dataclasses.replace(config, bias=True, **dict.fromkeys(OWN_BIASES))
    with init_empty_weights():
        whole = Decoder(biased)
    parameters = saved_parameters(model)
    zeros = {
        name: torch.zeros(tensor.shape, dtype=next(model.parameters()).dtype)
        for name, tensor in saved_parameters(whole).items()
        if name not in parameters
    }
    load_parameters(whole, parameters | zeros)
    yield whole

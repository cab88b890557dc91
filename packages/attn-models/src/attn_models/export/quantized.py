"""Quantises a model with a text: GPTQ and AWQ folders, and GGUF files of K-quants with an importance matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import Incompatible, InvalidValue
from torch import Tensor

from attn_models.adapters.base import StoredTensor
from attn_models.adapters.registry import decoder_adapter
from attn_models.evaluation import text_loss
from attn_models.export.calibration import calibrated, importance_of
from attn_models.export.integers import BITS, Integers, awq_block, gptq_block, group_size, linear_weights
from attn_models.export.k_quants import K_QUANTS
from attn_models.export.layouts import Expressed
from attn_models.export.model import expressed, require_free, write_published
from attn_models.loading import LoadedModel, load_model
from attn_models.sources.progress import Report, Step, silent
from attn_models.weights import read_folder
from attn_models.weights.manifest import read_source
from attn_models.weights.stored_format import CONFIG_KEY

Rounds = Callable[[Any, Mapping[str, Tensor], int], dict[str, Integers]]
INTEGERS: Mapping[str, tuple[Rounds, Callable[[Integers], dict[str, Tensor]], Mapping[str, Any]]] = {
    "gptq": (gptq_block, Integers.gptq, {"desc_act": False, "sym": False, "checkpoint_format": "gptq"}),
    "awq": (awq_block, Integers.awq, {"zero_point": True, "version": "gemm"}),
}
"""How blocks are rounded and stored, and what the `quantization_config` of a method says."""
METHODS = (*INTEGERS, *K_QUANTS)
WINDOW = 512
"""The number of tokens in a window, unless the model's context is shorter."""
MOST_WINDOWS = 32
"""The most windows that calibrate, and that are judged."""
HELD_OUT = 5
"""One in so many tokens, the last ones of the text, are left out of the calibration: the perplexity is theirs."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantised model: where it is, its layout or architecture, the type of each kind of matrix, and the perplexity
    of the held-out end of the text before and after."""

    path: Path
    layout: str
    types: Mapping[str, str]
    perplexity_before: float
    perplexity_after: float


def quantize_folder(
    folder: Path, target: Path, method: str, text: str, *, overwrite: bool = False, report: Report = silent
) -> Quantized:
    """Write the model in `folder` to `target` with quantised weights, completely or not at all.

    `gptq` and `awq` write a folder whose linear layers have integers of 4 bits, `q4_k`, `q5_k` and `q6_k` a GGUF file.
    The text calibrates, except for its last fifth, on which the perplexities are computed; of each at most
    `MOST_WINDOWS` windows are used.

    Raises `InvalidValue` for another method, an existing target without `overwrite` and a text that is too short,
    `Incompatible` for a model that the format cannot express and one without a tokenizer, and the errors of
    `load_model` and `write_folder`.
    """
    if method not in METHODS:
        raise InvalidValue.of("method", method, ", ".join(METHODS))
    require_free(target, overwrite=overwrite)
    source, loaded = read_folder(folder), load_model(folder, "float32", verify="sizes")
    windows, judged = _divided(loaded, text)
    size = windows.shape[1]
    before = math.exp(text_loss(loaded.model, judged, size, report=report, stage="perplexity before"))
    if method in INTEGERS:
        layout, types = _integers(target, loaded, source, (method, windows, report))
    else:
        from attn_models.export.gguf import write_gguf

        importance = importance_of(loaded.model, windows)
        written = write_gguf(target, loaded, expressed(loaded, source), method, importance)
        layout, types = written.architecture, written.types
    again = load_model(target, "float32")
    after = math.exp(text_loss(again.model, judged, size, report=report, stage="perplexity after"))
    return Quantized(path=target, layout=layout, types=types, perplexity_before=before, perplexity_after=after)


def _divided(loaded: LoadedModel, text: str) -> tuple[Tensor, Tensor]:
    """The windows [windows, tokens] that calibrate, and the tokens that are held out."""
    if loaded.tokenizer is None:
        raise Incompatible(f"{loaded.path} has no tokenizer, which is needed to read the text", path=loaded.path)
    ids = torch.tensor(loaded.tokenizer.encode(text))
    held = len(ids) // HELD_OUT
    size = min(WINDOW, loaded.model.max_seq_len)
    count = min(MOST_WINDOWS, (len(ids) - held) // size)
    if count < 1 or held < 2:
        raise InvalidValue.of("text", f"{len(ids)} tokens", f"{math.ceil(size * HELD_OUT / (HELD_OUT - 1))} or more")
    return ids[: count * size].view(count, size), ids[len(ids) - held :][: MOST_WINDOWS * size]


def _integers(
    target: Path, loaded: LoadedModel, source: Any, how: tuple[str, Tensor, Report]
) -> tuple[str, Mapping[str, str]]:
    """Write a folder of integers; returns its layout and the types of matrices."""
    method, windows, report = how
    rounds, stored, described = INTEGERS[method]
    found = expressed(loaded, source)
    names, group = _plain_names(found), group_size(loaded.model)
    if missing := sorted(name for name in linear_weights(loaded.model) if name not in names):
        raise Incompatible(f"{method} stores {missing[0]!r} as it is, which the layout {found.layout!r} does not")
    integers: dict[str, Integers] = {}
    for number, (prefix, block, products) in enumerate(calibrated(loaded.model, windows), start=1):
        for name, each in rounds(block, products, group).items():
            block.get_parameter(f"{name}.weight").copy_(each.weight())
            integers[f"{prefix}.{name}"] = each
        report(Step(method, number, len(loaded.model.blocks), "blocks"))
    tensors = dict(expressed(loaded, source).tensors)
    for name, each in integers.items():
        plain = names[f"{name}.weight"]
        del tensors[plain]
        tensors |= {plain.removesuffix("weight") + part: tensor for part, tensor in stored(each).items()}
    said = {"quant_method": method, "bits": BITS, "group_size": group, **described}
    tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    config = {**found.config, "dtype": "float16", CONFIG_KEY: said}
    changed = dataclasses.replace(found, config=config, tensors=tensors)
    write_published(target, changed, loaded, read_source(source.path))
    kinds = {name.rpartition(".")[2] for name in integers}
    return found.layout, dict.fromkeys(sorted(kinds), f"{method}, {BITS} bits in groups of {group}")


def _plain_names(found: Expressed) -> dict[str, str]:
    """The names of tensors that hold one parameter as it is, by that parameter."""
    adapter = decoder_adapter(found.layout)
    items = adapter.layout(adapter.from_hf_config(found.config)).stored(found.parameters)
    return {item.parameters[0]: item.name for item in items if item == StoredTensor(item.name, item.parameters[:1])}

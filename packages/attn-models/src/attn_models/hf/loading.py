"""Loads causal language models that transformers builds, by the first way in which they have transformers' logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from attn_core import RaggedBatch, installed
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_core.stores import StoreSize
from transformers import AutoConfig

from attn_models.adapters.registry import ADVICE, causal_class
from attn_models.adapters.state_dict import stored_type
from attn_models.hf.causal import ExchangedAttention, TransformersModel
from attn_models.hf.own_cache import OwnCache
from attn_models.quantization.block_tensor import widen_parameters
from attn_models.quantization.quantize import prepack_model, quantize_model
from attn_models.tokenizers.vocabulary import LibraryErrors
from attn_models.weights import CheckpointFolder
from attn_models.weights.quantized_tensors import DequantizedTensors, with_plain_weights
from attn_models.weights.stored_format import CONFIG_KEY

CHECKED = ((5, 1, 1, 1), (3, 3, 2, 1), (5, 2, 1, 1))
"""The lengths of the chunks of sequences that are computed together to check a model."""


def tolerance(dtype: torch.dtype) -> float:
    """How far logits of steps may be from those of transformers, relative to the largest one."""
    return 4000 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.1


@torch.inference_mode()
def require_same_logits(model: TransformersModel) -> None:
    """Raise `Incompatible` unless chunks of sequences in one cache give the logits of transformers."""
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(model.vocab_size, (sum(chunks),), generator=draw).to(device) for chunks in CHECKED]
    size = StoreSize(tokens=64, requests=len(texts), dtype=str(dtype).removeprefix("torch."), device=str(device))
    store, contexts, steps = (
        installed().caches.get("contiguous").create(model.state_specs(), size),
        [0] * len(texts),
        [],
    )
    for name, text in enumerate(texts):
        store.admit(name)
        store.reserve(name, len(text))
    for lengths in zip(*CHECKED, strict=True):
        batch = RaggedBatch.of(lengths, contexts, lambda numbers: torch.tensor(numbers, device=device))
        new = [text[at : at + n] for text, at, n in zip(texts, contexts, lengths, strict=True)]
        found = model.logits(model.step(torch.cat(new), batch, store.view(batch, range(len(texts)))))
        steps.append(torch.split(found, list(lengths)))
        contexts = [at + n for at, n in zip(contexts, lengths, strict=True)]
    for text, parts in zip(texts, zip(*steps, strict=True), strict=True):
        wanted = model(text[None])[0].float()
        off = float((torch.cat(parts).float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        if not off < tolerance(dtype):
            raise Incompatible(f"logits of steps are {off:.1e} off transformers'")


def class_of(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' config, and class of causal language models, for the config.json of a folder, which is `config`.

    Raises `CheckpointInvalid` for values that transformers refuses.
    """
    with LibraryErrors(lambda said: CheckpointInvalid.of(folder / "config.json", f"transformers says: {said}")):
        made = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    found: Any = getattr(transformers, str(causal_class(config)))
    return (made if found.config_class is type(made) else made.get_text_config()), found


@contextmanager
def named_refusals(folder: Path, kind: object) -> Iterator[None]:
    """Name the folder, its model_type and the next step in every `Incompatible` error."""
    try:
        yield
    except Incompatible as error:
        rule = f"model_type {kind!r} cannot run through transformers: {error.message}; {ADVICE}"
        raise Incompatible(f"{folder}: {rule}", field="model_type") from error


def empty_causal(folder: Path, config: Mapping[str, Any]) -> Any:
    """transformers' model of the config in a folder, without memory; raises as `load_causal` for the config."""
    return _on_meta(folder, *class_of(folder, config))


def _on_meta(folder: Path, made: Any, found: Any) -> Any:
    with torch.device("meta"), LibraryErrors(lambda said: CheckpointInvalid.of(folder, f"transformers says: {said}")):
        return found._from_config(made)  # noqa: SLF001 -- AutoModel's own way


def _require_fitting(checkpoint: CheckpointFolder, made: Any, found: Any) -> None:
    """Raise `CheckpointInvalid` for a config that describes far more than the tensors hold, before it takes memory."""
    path, entries = checkpoint.path, checkpoint.tensors.entries
    layers, stored = made.get_text_config().num_hidden_layers, sum(math.prod(entry.shape) for entry in entries.values())
    size = 0 if layers > len(entries) else sum(each.numel() for each in _on_meta(path, made, found).parameters())
    if layers > len(entries) or size > 2 * stored:
        rule = f"its config has {layers} layers of {size} parameters, and its {len(entries)} tensors hold {stored}"
        raise CheckpointInvalid.of(path, rule)


def load_causal(
    checkpoint: CheckpointFolder, dtype: torch.dtype, device: torch.device, pack: Callable[[Any], object]
) -> TransformersModel:
    """The model of a folder, built and read by transformers, without code or pickles of the folder. `pack` may pack its
    weights, or change it otherwise. transformers gets quantised weights dequantised.

    Raises `Incompatible` for models that cannot be computed so, `CheckpointInvalid` for missing tensors and for what
    transformers refuses.
    """
    path, plain = checkpoint.path, with_plain_weights(checkpoint)
    made, found = class_of(path, checkpoint.config)
    read: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    if plain is not checkpoint:
        read |= {"state_dict": dict(plain.tensors)}
        for part in (made, made.get_text_config()):
            vars(part).pop(CONFIG_KEY, None)
    _require_fitting(plain, made, found)
    with named_refusals(path, checkpoint.config.get("model_type")):
        source = path if plain is checkpoint else None
        with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"transformers says: {said}")):
            causal, said = found.from_pretrained(source, config=made, dtype=dtype, output_loading_info=True, **read)
        wrong = sorted({*said["missing_keys"], *(str(name) for name in said["mismatched_keys"])})
        if wrong:
            raise CheckpointInvalid.of(path, f"tensors are missing or have other shapes: {', '.join(wrong[:5])}")
        return _first_that_agrees(causal.to(device).eval(), pack)


def _first_that_agrees(causal: Any, pack: Callable[[Any], object]) -> TransformersModel:
    """The model with attn's attention if its steps agree with transformers, else with transformers' own cache."""
    said, packed = [], False
    for kind in (ExchangedAttention, OwnCache):
        try:
            with LibraryErrors(lambda said: Incompatible(f"{type(causal).__name__} cannot be stepped: {said}")):
                model: TransformersModel = kind(causal)
                if not packed:
                    pack(model)
                    packed = True
            _require_a_way(model)
        except Incompatible as error:
            said.append(error.message)
        else:
            return model
    raise Incompatible(f"with attn's attention, {said[0]}; with its own cache, {said[1]}")


def _require_a_way(model: TransformersModel) -> None:
    """Leave the model with the first way of batching whose steps agree; raises `Incompatible` if none does."""
    *others, last = model.ways
    for way in others:
        model.way = way
        with suppress(Incompatible), LibraryErrors(Incompatible):
            require_same_logits(model)
            return
    model.way = last
    with LibraryErrors(lambda said: Incompatible(f"it cannot be stepped: {said}")):
        require_same_logits(model)


UNFUSED = (None, "none", "auto", "float32", "bfloat16", "int8")
"""Quantizations of models that transformers builds: each linear layer by itself, the unembedding like the others."""


def load_through_transformers(
    checkpoint: CheckpointFolder, dtype: str, quantization: str | None, prepare: Callable[[Any], object] | None
) -> tuple[Any, int]:
    """The model of a family that only transformers knows, and its number of parameters; raises as `load_causal`."""
    if quantization not in UNFUSED:
        allowed = ", ".join(filter(None, UNFUSED))
        raise Incompatible(f"quantization {quantization!r}: a model that transformers builds takes {allowed}")
    device, counts = torch.device(checkpoint.tensors.device), []
    packs = quantization == "auto" and dtype == "float32" and device.type == "cpu"
    read_as = stored_type(with_plain_weights(checkpoint)) if packs else getattr(torch, dtype)

    def pack(model: Any) -> None:
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        if prepare is not None:
            prepare(model)
        if packs:
            blocks = with_plain_weights(checkpoint, in_blocks=True).tensors
            kept = blocks.kept() if isinstance(blocks, DequantizedTensors) else {}
            for name, layer in model.causal.named_modules():
                if type(layer) is torch.nn.Linear and f"{name}.weight" in kept:
                    layer.weight = torch.nn.Parameter(blocks[f"{name}.weight"], requires_grad=False)
            prepack_model(model, read_as)
            widen_parameters(model)
        elif quantization not in (None, "none", "auto"):
            quantize_model(model, quantization, getattr(torch, dtype))

    return load_causal(checkpoint, read_as, device, pack), counts[0]

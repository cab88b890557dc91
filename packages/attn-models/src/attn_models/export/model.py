"""Exports a model for other programs: a folder in a published layout, a GGUF file, ONNX, or one safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from attn_core.errors import Incompatible, InvalidValue

from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.native import LAYOUTS, NativeAdapter, NativeEncoderAdapter, NativeVitAdapter
from attn_models.adapters.registry import installed_adapters
from attn_models.export.card import model_card
from attn_models.export.layouts import Expressed, published
from attn_models.loading import LoadedModel, load_model
from attn_models.weights import CheckpointFolder, read_folder, write_folder
from attn_models.weights.atomic_write import staged_file, staged_folder
from attn_models.weights.checkpoint_folder import GENERATION_NAME, write_side_files
from attn_models.weights.manifest import MANIFEST_NAME, read_source
from attn_models.weights.quantized_tensors import with_plain_weights

ExportFormat = Literal["hf", "gguf", "onnx", "safetensors"]
CARD_NAME = "README.md"
OURS = {*LAYOUTS, NativeAdapter.model_type, NativeEncoderAdapter.model_type, NativeVitAdapter.model_type}
"""The layouts that only this project reads."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A finished export: where it is, and its layout (`model_type`) or architecture, empty where it has none.

    `types` is the type of each kind of matrix of a GGUF file.
    """

    path: Path
    layout: str
    types: Mapping[str, str] = field(default_factory=dict)


def export_model(
    folder: Path, target: Path, to: ExportFormat = "hf", *, quantization: str | None = None, overwrite: bool = False
) -> Exported:
    """Write the model in `folder` to `target` for other programs, completely or not at all.

    `hf` is a folder that Hugging Face's transformers reads: weights and config.json in the published layout that
    expresses the model exactly, with tokenizer, generation config and model card. `gguf` is a file for llama.cpp, whose
    matrices are stored as `quantization` (f32, f16, q8_0, q6_k, q5_k or q4_k; by default f16), which other formats
    refuse. `onnx` is a folder with model.onnx, which computes logits [batch, tokens, vocabulary] of token ids [batch,
    tokens], both axes of any length. `safetensors` is one file with the parameters under their own names, and the
    config in its metadata.

    An existing target is refused, unless `overwrite` is True and it is a file or a model folder that attn wrote. Raises
    `Incompatible` for a model that the format cannot express, naming the fields, and for a tokenizer that it cannot;
    `CheckpointInvalid` for a folder that is damaged; `CheckpointWriteFailed` where the file system fails;
    `MissingPackage` for ONNX without its libraries.
    """
    if to not in get_args(ExportFormat):
        raise InvalidValue.of("to", to, ", ".join(get_args(ExportFormat)))
    if quantization is not None and to != "gguf":
        raise InvalidValue.of("quantization", quantization, f"left out for {to}: only a GGUF file's matrices have one")
    require_free(target, overwrite=overwrite)
    source = read_folder(folder)
    if to == "hf" and source.config.get("model_type") not in OURS and "quantization_config" not in source.config:
        return _copied(source, target)
    known = {*LAYOUTS, *installed_adapters(StateDictAdapter)}  # type: ignore[type-abstract]
    if source.config.get("model_type") not in known:
        rule = f"a model in the layout {source.config.get('model_type')!r} cannot be exported to {to}"
        raise Incompatible(f"{folder}: {rule}", path=folder, field="model_type")
    loaded = load_model(folder, _stored_dtype(source), verify="sizes")
    origin = read_source(folder)
    match to:
        case "hf":
            return Exported(path=target, layout=write_published(target, expressed(loaded, source), loaded, origin))
        case "gguf":
            from attn_models.export.gguf import write_gguf

            written = write_gguf(target, loaded, expressed(loaded, source), quantization or "f16")
            return Exported(path=target, layout=written.architecture, types=written.types)
        case "onnx":
            _write_onnx(target, loaded)
        case "safetensors":
            _write_safetensors(target, loaded)
    return Exported(path=target, layout="")


def require_free(target: Path, *, overwrite: bool) -> None:
    """Raise `InvalidValue` if something is at `target`, unless it may be overwritten."""
    if target.exists() and not overwrite:
        raise InvalidValue.of("target", str(target), "a path where nothing is yet, or --overwrite")


def _stored_dtype(source: CheckpointFolder) -> str:
    from attn_models.adapters.state_dict import stored_type

    return str(stored_type(with_plain_weights(source))).removeprefix("torch.")


def expressed(loaded: LoadedModel, source: CheckpointFolder) -> Expressed:
    """The model in the published layout of its folder, or if that is ours in the one that expresses it."""
    own = str(source.config.get("model_type"))
    if own in LAYOUTS:
        rule = f"no published layout expresses a model of the family {loaded.family!r}"
        raise Incompatible(f"{source.path}: {rule}", path=source.path, field="family")
    return published(loaded.model, None if own in OURS else own)


def write_published(target: Path, found: Expressed, loaded: LoadedModel, origin: Mapping[str, Any]) -> str:
    """Write a folder in a published layout, with tokenizer, generation config and model card; returns the layout."""
    files: dict[str, Any] = dict(loaded.tokenizer.files()) if loaded.tokenizer else {}
    ids = special_ids(loaded)
    files[GENERATION_NAME] = {**{name: value for name, value in ids.items() if value is not None}, **loaded.generation}
    files[CARD_NAME] = model_card(loaded, found.layout, origin).encode()
    # Null where there is no such token: transformers' defaults are tokens of other vocabularies.
    write_folder(target, {**found.config, **ids}, found.tensors, files, {"exported": found.layout, **origin})
    return found.layout


def special_ids(loaded: LoadedModel) -> dict[str, int | list[int] | None]:
    """The ids of the tokens that begin, end and pad texts, named as in config.json; None for those a model lacks."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ends = sorted(tokenizer.end_ids)
    end: int | list[int] | None = ends if len(ends) > 1 else next(iter(ends), None)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": end, "pad_token_id": tokenizer.pad_id}


def _copied(source: CheckpointFolder, target: Path) -> Exported:
    """A copy of a folder that is in a published layout already."""
    with staged_folder(target, read_source(source.path)) as stage:
        for path in sorted(source.path.iterdir()):
            if path.is_file() and path.name != MANIFEST_NAME:
                shutil.copyfile(path, stage / path.name)
        layout = str(source.config.get("model_type"))
        if not (stage / CARD_NAME).exists() and layout in installed_adapters(StateDictAdapter):  # type: ignore[type-abstract]
            loaded = load_model(source.path, _stored_dtype(source), verify="sizes")
            (stage / CARD_NAME).write_text(model_card(loaded, layout, read_source(source.path)), encoding="utf-8")
    return Exported(path=target, layout=layout)


def _write_onnx(target: Path, loaded: LoadedModel) -> None:
    from attn_models.export.onnx import write_onnx

    with staged_folder(target) as stage:
        write_onnx(stage / "model.onnx", loaded.model)
        write_side_files(stage, {**(loaded.tokenizer.files() if loaded.tokenizer else {})})


def _write_safetensors(target: Path, loaded: LoadedModel) -> None:
    from safetensors.torch import save_file

    from attn_models.adapters.state_dict import saved_parameters

    tensors = {name: tensor.contiguous() for name, tensor in saved_parameters(loaded.model).items()}
    described = {"format": "pt", "config": json.dumps(loaded.config.plain())}
    with staged_file(target) as stage:
        save_file(tensors, stage, metadata=described)
        stage.chmod(0o644)

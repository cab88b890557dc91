"""Loading encoders from checkpoint folders and saving them, with or without a head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor, nn

from attn_models.adapters.base import EncoderAdapter, require_allowed
from attn_models.adapters.bert import BertAdapter
from attn_models.adapters.hf_config import adapter_config, refused_config
from attn_models.adapters.native import NativeEncoderAdapter
from attn_models.adapters.registry import (
    encoder_adapter,
    encoder_adapter_for,
    installed_adapters,
    packages_of,
    vit_adapter,
    vit_adapter_for,
)
from attn_models.adapters.state_dict import (
    check_config_fits,
    fill_buffers,
    init_empty_weights,
    load_parameters,
    read_parameters,
    saved_parameters,
    stored_tensors,
)
from attn_models.adapters.vit import labels_of
from attn_models.device import resolve_device
from attn_models.encoder.config import ClassifierConfig, EncoderConfig, ModernBertConfig
from attn_models.encoder.encoder import (
    FirstTokenClassifier,
    MaskedLanguageModel,
    Tagger,
    TextClassifier,
    VisionTransformer,
)
from attn_models.encoder.modernbert import ModernBertClassifier
from attn_models.quantization.quantize import require_not_quantized
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, Verify, read_folder, write_folder
from attn_models.weights.safe_files import read_config
from attn_models.weights.safetensors_files import require_floats


def is_encoder(folder: Path) -> bool:
    """Whether a model folder's config.json describes an encoder; raises `CheckpointInvalid` if it is not JSON."""
    return read_config(folder / "config.json").get("model_type") in installed_adapters(EncoderAdapter)  # type: ignore[type-abstract]


def is_text_classifier(folder: Path) -> bool:
    """Whether a model folder holds a text classifier; raises `CheckpointInvalid` for a damaged folder."""
    return is_encoder(folder) and _classifier_of(read_folder(folder, verify="sizes")) is not Tagger


def build_encoder(checkpoint: CheckpointFolder, dtype: torch.dtype) -> Any:
    """The encoder in a checkpoint folder, on the device that the folder's tensors are read onto.

    Unknown keys of its config.json are logged as a warning. Raises `CheckpointInvalid` for a folder that does not fit
    the model, naming tensors that are missing, extra or misshaped; `UnknownName` for another kind of model.
    """
    path = checkpoint.path / "config.json"
    adapter = encoder_adapter(checkpoint.config.get("model_type"), checkpoint.config.get("requires"))
    try:
        own = {key: value for key, value in checkpoint.config.items() if key != POOLING_MODE}
        config = adapter_config(adapter, own, path)
        check_config_fits(checkpoint, config)
    except InvalidValue as error:
        raise refused_config(path, error, checkpoint.config, adapter.keys) from error
    with init_empty_weights():
        model = adapter.build(config)
    wanted = saved_parameters(model)
    load_parameters(model, read_parameters(checkpoint, adapter.layout(config), wanted, dtype))
    if any(buffer.is_meta for buffer in model.buffers()):
        fill_buffers(model, adapter.build(config), checkpoint.tensors.device)
    return model


def save_encoder(
    folder: str | Path, model: Any, tokenizer: Tokenizer | None = None, *, layout: str = NativeEncoderAdapter.model_type
) -> Path:
    """Write an encoder as a checkpoint folder, which replaces an existing one; it is written completely or not at all.

    `layout` is the `model_type` to write: the default can express every encoder, the others can be read by transformers
    too. Raises `Incompatible` for an encoder that the layout cannot express, `InvalidValue` for weights that are not
    finite, `CheckpointWriteFailed` for errors of the file system, `WrongState` if the encoder's weights are packed.
    """
    require_not_quantized(model, "weights packed as {} cannot be written; load the model without packing")
    adapter = encoder_adapter(layout)
    described = adapter.to_hf_config(model.config) | packages_of(adapter)
    described["dtype"] = str(model.embedding.weight.dtype).removeprefix("torch.")
    files: dict[str, Any] = dict(tokenizer.files()) if tokenizer else {}
    return write_folder(folder, described, stored_tensors(saved_parameters(model), adapter.layout(model.config)), files)


POOLING_MODE = "pooling_mode"
"""A key of ours in the config.json of a converted encoder: the pooling of a text, where it has no modules.json."""
Classifier: TypeAlias = Tagger | TextClassifier | FirstTokenClassifier | ModernBertClassifier
POOLED = "classifier.query"
"""A tensor that only text classifiers have."""


def save_masked(folder: str | Path, model: MaskedLanguageModel, tokenizer: Tokenizer) -> Path:
    """Write a masked language model as a checkpoint folder; raises the errors of `save_encoder`."""
    return _save(folder, model, {"architectures": ["BertForMaskedLM"]}, tokenizer)


def save_classifier(
    folder: str | Path, model: Tagger | TextClassifier, labels: Sequence[str], tokenizer: Tokenizer
) -> Path:
    """Write a classifier of tokens or of texts with its `labels` as a checkpoint folder.

    Raises the errors of `save_encoder`, and `InvalidValue` unless there is a different label for each class.
    """
    if len(set(labels)) != model.config.classes:
        raise InvalidValue.of("labels", list(labels), f"{model.config.classes} different ones")
    tagger = isinstance(model, Tagger)
    head_config = {
        "architectures": ["BertForTokenClassification" if tagger else "AttnTextClassifier"],
        "id2label": {str(place): label for place, label in enumerate(labels)},
        "label2id": {label: place for place, label in enumerate(labels)},
    }
    return _save(folder, model, head_config, tokenizer)


def load_masked(
    folder: str | Path, *, verify: Verify = "hashes", device: str = "cpu"
) -> tuple[MaskedLanguageModel, Tokenizer]:
    """The masked language model in a folder, in float32 on `device`, in evaluation mode, and its tokenizer.

    Raises the errors of `build_encoder`, also for the head's tensors, and those of `resolve_device`.
    """
    checkpoint, adapter, encoder, tokenizer = _loaded(folder, verify, device)
    with init_empty_weights():
        model = MaskedLanguageModel(encoder, adapter.masked_activation)
    names = adapter.names_of_heads(checkpoint.tensors.entries)
    _read_head(checkpoint, names, model, adapter.head_zeros)
    _require_tied(checkpoint, names, encoder.embedding.weight)
    return model.eval(), tokenizer


def load_classifier(
    folder: str | Path, *, verify: Verify = "hashes", device: str = "cpu"
) -> tuple[Classifier, list[str], Tokenizer]:
    """The classifier in a folder, in float32 on `device`, in evaluation mode, its labels and its tokenizer.

    Raises the errors of `load_masked`, and `CheckpointInvalid` for bad labels.
    """
    checkpoint, adapter, encoder, tokenizer = _loaded(folder, verify, device)
    try:
        labels = labels_of(checkpoint.config)
    except InvalidValue as error:
        raise CheckpointInvalid.of(checkpoint.path / "config.json", error.message) from error
    kind, activation = _classifier_of(checkpoint), adapter.pooled_activation
    if activation is None or not isinstance(encoder.config, EncoderConfig | ModernBertConfig):
        rule = f"model_type: {adapter.model_type!r} has classifiers that are not read; its encoder is, for embeddings"
        raise CheckpointInvalid.of(checkpoint.path / "config.json", rule)
    model: Classifier
    names = {} if kind is Tagger else adapter.names_of_heads(checkpoint.tensors.entries)
    with init_empty_weights():
        if isinstance(encoder.config, ModernBertConfig):
            pooling = None if kind is Tagger else checkpoint.config.get("classifier_pooling", "cls")
            model, names = ModernBertClassifier(encoder.config, len(labels), activation, pooling), {}
        else:
            config = ClassifierConfig(encoder=encoder.config, classes=len(labels))
            model = FirstTokenClassifier(config, activation) if kind is FirstTokenClassifier else kind(config)
    model.encoder = encoder
    _read_head(checkpoint, names, model, adapter.head_zeros)
    return model.eval(), labels, tokenizer


def _classifier_of(checkpoint: CheckpointFolder) -> type[Tagger | TextClassifier | FirstTokenClassifier]:
    """The class of the classifier in a folder: by its tensors if it is ours, else by its `architectures`."""
    if POOLED in checkpoint.tensors.entries:
        return TextClassifier
    named = checkpoint.config.get("architectures") or ()
    return FirstTokenClassifier if any("ForSequence" in str(name) for name in named) else Tagger


def _head_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's head by their names, which are those in a checkpoint."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("encoder.")}


def _save(folder: str | Path, model: Any, head_config: dict[str, Any], tokenizer: Tokenizer) -> Path:
    encoder = model.encoder
    adapter = encoder_adapter_for(encoder.config)
    # `head_config` describes a head of BERT, so it overrides the keys of the adapter only if that is BERT's.
    described = (head_config | adapter.to_hf_config(encoder.config)) | (
        head_config if adapter.model_type == BertAdapter.model_type else {}
    )
    described["dtype"] = str(encoder.embedding.weight.dtype).removeprefix("torch.")
    body = stored_tensors(saved_parameters(encoder), adapter.layout(encoder.config))
    tensors = {f"{adapter.prefix}{name}": tensor for name, tensor in body.items()}
    return write_folder(folder, described, tensors | _head_of(model), dict(tokenizer.files()))


def _loaded(folder: str | Path, verify: Verify, device: str) -> tuple[CheckpointFolder, EncoderAdapter, Any, Tokenizer]:
    checkpoint = read_folder(folder, verify=verify, device=resolve_device(device))
    encoder = build_encoder(checkpoint, torch.float32)
    if checkpoint.tokenizer is None:
        raise CheckpointInvalid.of(checkpoint.path, "has no tokenizer.json")
    adapter = encoder_adapter(checkpoint.config.get("model_type"))
    try:
        require_allowed(checkpoint.config, adapter.head_values)
    except InvalidValue as error:
        raise refused_config(checkpoint.path / "config.json", error, checkpoint.config, {}) from error
    return checkpoint, adapter, encoder, Tokenizer.from_folder(checkpoint.path, encoder.embedding.weight.shape[0])


def _stored_name(names: Mapping[str, str], ours: str) -> str:
    """The name in a checkpoint of a head's parameter, by those of modules."""
    longest = max((name for name in names if f"{ours}.".startswith(f"{name}.")), key=len, default="")
    return names.get(longest, "") + ours.removeprefix(longest)


def _require_tied(checkpoint: CheckpointFolder, names: Mapping[str, str], embedding: Tensor) -> None:
    """Raises `CheckpointInvalid` for an unembedding that is not the embedding."""
    place = _stored_name(names, "cls.predictions.bias").removesuffix(".bias").removesuffix(".decoder")
    for name in (f"{place}.decoder.weight", f"{place}.weight"):
        if name in checkpoint.tensors.entries and not torch.equal(checkpoint.tensors[name].to(embedding), embedding):
            raise CheckpointInvalid.of(checkpoint.path, f"{name!r} is not the embedding, as in the models read here")


NONE = re.compile(r"(?!)")


def _read_head(
    checkpoint: CheckpointFolder, names: Mapping[str, str], model: nn.Module, zeros: re.Pattern[str] = NONE
) -> None:
    """Read the parameters of a head, which are stored under `names`; those of `zeros` may be left out."""
    problems, found = [], dict[str, Tensor]()
    wanted = {_stored_name(names, name): (name, parameter) for name, parameter in _head_of(model).items()}
    for stored, (name, parameter) in wanted.items():
        entry = checkpoint.tensors.entries.get(stored)
        if zeros.search(name) and entry is None:
            found[name] = torch.zeros(parameter.shape, device=checkpoint.tensors.device)
        elif entry is None:
            problems.append(f"tensor {stored!r} is missing")
        elif tuple(entry.shape) != tuple(parameter.shape):
            problems.append(f"tensor {stored!r} has shape {list(entry.shape)}; its model needs {list(parameter.shape)}")
        else:
            require_floats(checkpoint.path, checkpoint.tensors.entries, [stored])
            found[name] = checkpoint.tensors[stored].to(torch.float32)
    if problems:
        raise CheckpointInvalid.of(checkpoint.path, "; ".join(problems))
    model.load_state_dict(found, strict=False, assign=True)


class ImageClassifier:
    """A vision Transformer with a label for each class; raises `InvalidValue` unless there is one, unique, for each."""

    def __init__(self, model: VisionTransformer, labels: Sequence[str]) -> None:
        if len(labels) != model.config.classes or len(set(labels)) < len(labels):
            raise InvalidValue.of("labels", list(labels), f"{model.config.classes} different ones")
        self.model = model
        self.labels = tuple(labels)

    @torch.inference_mode()
    def classify(self, images: Tensor) -> list[dict[str, float]]:
        """The probability of each label, for each of the images [batch, channels, side, side], whose pixels are
        normalised as in training.

        Raises `InvalidValue` for images of another shape.
        """
        rows = self.model(images.to(self.model.begin)).softmax(-1).tolist()
        return [dict(zip(self.labels, row, strict=True)) for row in rows]

    def save(self, folder: Path) -> Path:
        """Write a checkpoint folder and return it; transformers can read it if it supports the attention."""
        layout = vit_adapter_for(self.model.config)
        described = layout.to_hf_config(self.model.config, self.labels) | {"dtype": "float32"}
        return write_folder(folder, described, layout.add_prefix(stored_tensors(self.model.state_dict(), layout)))


def load_image_classifier(
    folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes", device: str = "cpu"
) -> ImageClassifier:
    """The image classifier in a folder, on `device`, in evaluation mode.

    Raises `CheckpointInvalid` for a folder that is damaged or does not fit the model, naming tensors that are
    missing, extra or misshaped; `UnknownName` for another kind of model; and the errors of `resolve_device`.
    """
    checkpoint = read_folder(folder, verify=verify, device=resolve_device(device))
    path = checkpoint.path / "config.json"
    layout = vit_adapter(checkpoint.config.get("model_type"))
    config = layout.from_hf_config(checkpoint.config, path)
    try:
        check_config_fits(checkpoint, config)
    except InvalidValue as error:
        raise refused_config(path, error, checkpoint.config, {}) from error
    with init_empty_weights():
        model = VisionTransformer(config)
    parameters = read_parameters(checkpoint, layout, model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    try:
        return ImageClassifier(model.eval(), labels_of(checkpoint.config))
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error

"""Evaluation of a trained model on data: perplexity, and accuracy for images, tagged tokens and masked tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.adapters.base import EncoderAdapter
from attn_models.adapters.registry import installed_adapters
from attn_models.adapters.vit import VitAdapter
from attn_models.evaluation import MAX_WINDOW, text_loss
from attn_models.loading import load_model
from attn_models.loading.encoders import is_text_classifier, load_classifier, load_image_classifier, load_masked
from attn_models.tokenizers import Tokenizer
from attn_models.weights import read_folder
from attn_models.weights.safe_files import read_config
from attn_schema import DeviceConfig
from attn_schema.device import AUTO
from attn_schema.text_files import files_of
from attn_schema.training import DataConfig
from torch import Tensor

from attn_train.data.images import known_images, load_images
from attn_train.data.labels import QUESTIONS, questions, read_labels, shortened, tokenize_labels
from attn_train.data.load import text_path
from attn_train.data.treebank import read_sentences, tokenize_sentences
from attn_train.tasks.image_classification import LabelledImages, classification_metrics
from attn_train.tasks.language_modeling import read_text, text_measures
from attn_train.tasks.masked_language_modeling import FINAL_BATCHES, MaskedText, masked_metrics
from attn_train.tasks.token_classification import tagging_accuracy

BATCH = 32


def evaluate(folder: Path, data: str, home: Path, where: DeviceConfig = DeviceConfig()) -> dict[str, float]:  # noqa: B008  (frozen)
    """Evaluate the model in `folder` on `data`, and return its metrics by name, as at the end of training.

    `data` is a file or known set of images for an image classifier, a .conllu file for a tagger, a file of
    LABEL<tab>TEXT or known labelled texts for a text classifier, and a text for a masked or causal language model.
    `where` is the device and element type; all models but causal language models run in float32. Raises
    `CheckpointInvalid` for a damaged folder, `Incompatible` for an unsupported kind of model, and `InvalidValue` for
    data that cannot be read or do not fit the model, and for an unavailable device or element type.
    """
    return _measure(folder)(folder, data, home, where)


def _measure(folder: Path) -> Callable[[Path, str, Path, DeviceConfig], dict[str, float]]:
    layout = read_config(folder / "config.json").get("model_type")
    if layout in installed_adapters(VitAdapter):
        return _image_classifier
    if layout not in installed_adapters(EncoderAdapter):  # type: ignore[type-abstract]
        return _language_model
    names = read_folder(folder, verify="sizes").tensors.entries
    if "cls.predictions.bias" in names:
        return _masked_language_model
    if "classifier.weight" in names:
        return _text_classifier if is_text_classifier(folder) else _tagger
    raise Incompatible(f"{folder}: only encoders for classification or masked language modelling can be evaluated")


def _image_classifier(folder: Path, data: str, home: Path, where: DeviceConfig) -> dict[str, float]:  # noqa: ARG001 - the signature of all of these functions
    classifier = load_image_classifier(folder, _float32(where), device=where.device)
    config = DataConfig(dataset=data) if data in known_images() else _file(data).replace(validation_fraction=0.0)
    images = load_images(config)
    if unknown := sorted(set(images.names) - set(classifier.labels)):
        allowed = f"the classes of the model: {', '.join(classifier.labels)}"
        raise InvalidValue.of("data", f"images of the classes {', '.join(unknown)}", allowed)
    labelled = images.validation if len(images.validation.labels) else images.training
    places = torch.tensor([classifier.labels.index(name) for name in images.names])
    metrics = classification_metrics(classifier.model, LabelledImages(labelled.images, places[labelled.labels]))
    return {"images": float(len(labelled.labels)), "loss": metrics["loss"], "accuracy": metrics["accuracy"]}


def _tagger(folder: Path, data: str, home: Path, where: DeviceConfig) -> dict[str, float]:  # noqa: ARG001 - the signature of all of these functions
    _float32(where)
    tagger, names, tokenizer = load_classifier(folder, device=where.device)
    kept = tokenize_sentences(read_sentences([Path(data)]), tokenizer, names, tagger.encoder.max_seq_len)
    accuracy = tagging_accuracy(tagger, kept, BATCH)
    if accuracy is None:
        allowed = f"data with at least one tagged sentence of at most {tagger.encoder.max_seq_len} tokens"
        raise InvalidValue.of("data", data, allowed)
    return {"sentences": float(len(kept)), "accuracy": accuracy}


def _text_classifier(folder: Path, data: str, home: Path, where: DeviceConfig) -> dict[str, float]:  # noqa: ARG001 - the signature of all of these functions
    _float32(where)
    classifier, names, tokenizer = load_classifier(folder, device=where.device)
    texts = questions() if data == QUESTIONS else read_labels([Path(data)])
    context = classifier.encoder.max_seq_len
    accuracy = tagging_accuracy(
        classifier, [shortened(one, context) for one in tokenize_labels(texts, tokenizer, names)], BATCH
    )
    if accuracy is None:
        raise InvalidValue.of("data", data, "a file with at least one text")
    return {"texts": float(len(texts)), "accuracy": accuracy}


def _masked_language_model(folder: Path, data: str, home: Path, where: DeviceConfig) -> dict[str, float]:
    _float32(where)
    model, tokenizer = load_masked(folder, device=where.device)
    _, ids = _read(data, tokenizer, home)
    text = MaskedText(ids.long(), tokenizer)
    metrics = masked_metrics(model, text.batches(FINAL_BATCHES, model.encoder.max_seq_len, BATCH))
    if not metrics:
        raise InvalidValue.of("data", f"{len(ids)} tokens", "more tokens, of which some are chosen to be masked")
    return {"tokens": float(len(ids)), "loss": metrics["loss"], "masked_accuracy": metrics["accuracy"]}


def _language_model(folder: Path, data: str, home: Path, where: DeviceConfig) -> dict[str, float]:
    loaded = load_model(folder, where.dtype, device=where.device)
    if loaded.max_encoder_len is not None:
        message = f"{folder} is an encoder-decoder: measure its BLEU with attn translate --references"
        raise Incompatible(message)
    if loaded.tokenizer is None:
        raise InvalidValue.of("model", folder, "a model folder with a tokenizer.json")
    text, ids = _read(data, loaded.tokenizer, home)
    window = min(MAX_WINDOW, loaded.model.max_seq_len)
    loss = text_loss(loaded.model, ids, window)
    found = {"loss": loss, "perplexity": math.exp(loss)} | text_measures(loss * (len(ids) - 1), text)
    return {"tokens": float(len(ids)), "window": float(window), **found}


def _float32(where: DeviceConfig) -> str:
    """Return "float32", for models that are evaluated only in it; raises `InvalidValue` if another type is given."""
    if where.dtype not in (AUTO, "float32", "fp32"):
        raise InvalidValue.of(
            "dtype", where.dtype, "auto or float32: only causal language models are evaluated in other types"
        )
    return "float32"


def _read(data: str, tokenizer: Tokenizer, home: Path) -> tuple[str, Tensor]:
    config = _file(data) if Path(data).exists() else DataConfig(dataset=data)
    text = read_text(files_of(text_path(config, home, lambda _: None)))
    return text, torch.from_numpy(tokenizer.encode_corpus(text))


def _file(path: str) -> DataConfig:
    return DataConfig(dataset=str(Path(path).absolute()))

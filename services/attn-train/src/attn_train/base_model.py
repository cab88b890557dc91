"""Training from a base model: loading it, choosing what is trained (all weights or LoRA), and saving the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_models.adapters.native import NativeAdapter
from attn_models.loading import LoadedModel, load_model, save_model
from attn_models.loading.models import config_of, family_of, fresh_model
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter, write_adapter
from attn_models.lora.files import modules_of, require_writable, weights_sha256
from attn_models.lora.frozen import let_gradients_through
from attn_models.lora.peft_config import is_adapter
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.model import VisionDecoder
from attn_models.weights.safe_files import read_config
from attn_schema.decoder import DecoderConfig
from attn_schema.home import model_folder_name, model_names, models_folder
from attn_schema.model import DECODER
from attn_schema.training import TrainingConfig
from torch import nn

from attn_train.data.load import tokenizer_folder
from attn_train.data.synthetic import TASKS
from attn_train.data.token_shards.shards import PreparedData
from attn_train.tasks.base import derived
from attn_train.tasks.language_modeling import CHARACTER

FIELD = "config.model.base_model"
SEQUENCE_LENGTH = 512
"""Default length of a training sequence in tokens; less if the base model has a shorter context."""
LORA = "lora"
"""The name of the adapter's submodule in the model that is trained."""


def base_folder(name: str, home: Path) -> Path:
    """Return the folder of the model with this name in `home`, or at this absolute path.

    Raises `UnknownName` for a name without a model, `InvalidValue` for a path without a config.json and for an adapter.
    """
    if name in model_names(home):
        return models_folder(home) / model_folder_name(name)
    if "/" in name:
        folder = Path(name)
        if not folder.is_absolute() or not (folder / "config.json").is_file():
            raise InvalidValue.of(FIELD, name, "a model's name, or the absolute path of a folder with a config.json")
        return folder
    if is_adapter(models_folder(home) / name):
        raise InvalidValue.of(FIELD, name, "a full model, not an adapter")
    raise UnknownName.of("model", name, model_names(home))


def completed(config: TrainingConfig, *, home: Path) -> TrainingConfig:
    """Return the configuration with the fields that follow from its base: family, tokenizer and sequence length.

    A configuration without a base is returned as it is. Raises `InvalidValue` or `Incompatible` for model fields, a
    tokenizer or prepared data that do not match the base.
    """
    if config.model.base_model is None:
        return config
    folder = base_folder(config.model.base_model, home)
    base = _config_of(folder)
    _require_same_model(config, base, folder)
    if config.data.name in TASKS:
        raise InvalidValue.of(
            "config.data.dataset",
            config.data.name,
            "a text: synthetic tasks need a vocabulary of their own, but the base model has a fixed one",
        )
    length = config.model.max_seq_len or min(base.max_seq_len, SEQUENCE_LENGTH)
    if length > base.max_seq_len:
        raise InvalidValue.of(
            "config.model.max_seq_len", length, f"1 to {base.max_seq_len}, the context length of the base model"
        )
    family = _family(base)
    model = config.model.replace(family=family, max_seq_len=length)
    for source in config.data.sources:
        theirs, ours = PreparedData.open(Path(source.path)).tokenizer, Tokenizer.from_folder(folder)
        require_same_vocabulary(f"data {source.name}", theirs, "base model", ours, field="config.data.prepared")
    if config.data.prepared:
        return config.replace(model=model)
    if config.data.tokenizer == CHARACTER:
        return config.replace(model=model, data=config.data.replace(tokenizer=config.model.base_model))
    _require_same_tokenizer(folder, Path(tokenizer_folder(config.data.tokenizer, home)))
    return config.replace(model=model)


def _family(base: Any) -> str:
    return DECODER if isinstance(base, DecoderConfig) else family_of(base) or DECODER


def _config_of(folder: Path) -> Any:
    try:
        base = config_of(folder)
    except UnknownName as error:
        raise Incompatible(f"the base model {folder.name} is not a decoder: {error.message}", field=FIELD) from error
    if hasattr(base, "max_encoder_len"):
        raise Incompatible(
            f"the base model {folder.name} is an encoder-decoder; only decoders can be base models", field=FIELD
        )
    if not (folder / "tokenizer.json").is_file():
        raise InvalidValue.of(FIELD, str(folder), "a model with a tokenizer.json")
    return base


def _require_same_model(config: TrainingConfig, base: Any, folder: Path) -> None:
    """Raise `InvalidValue` for a given model field that differs from the base's."""
    model = config.model
    family = _family(base)
    if model.family not in (DECODER, family, family.rpartition("/")[2]):
        raise InvalidValue.of(
            "config.model.family", model.family, f"{family}, the family of the base model {folder.name}"
        )
    registry = installed().mechanisms
    for name, given in model.config_fields().items():
        theirs = getattr(base, name, None)
        same = given == theirs
        if name == "mechanism":
            same = theirs is not None and registry.full_name(given) == registry.full_name(theirs)
        if name != "max_seq_len" and not same:
            place = name if name in type(model).__struct_fields__ else f"model_options.{name}"
            raise InvalidValue.of(
                f"config.model.{place}", given, f"{theirs}, the value of the base model {folder.name}, or none"
            )


def _require_same_tokenizer(base: Path, given: Path) -> None:
    """Raise `Incompatible` for a tokenizer whose vocabulary differs from the base's."""
    theirs, ours = Tokenizer.from_folder(given), Tokenizer.from_folder(base)
    require_same_vocabulary(f"tokenizer {given.name}", theirs, "base model", ours, field="config.data.tokenizer")


def require_same_vocabulary(name: str, theirs: Tokenizer, other: str, ours: Tokenizer, *, field: str) -> None:
    """Raise `Incompatible` if the vocabularies of two tokenizers differ in size or in a token.

    The message names the first token that differs; `name` and `other` are the names of the two tokenizers' owners.
    """
    problem = f"the vocabulary of {name} differs from that of the {other}"
    if theirs.vocab_size != ours.vocab_size:
        raise Incompatible(f"{problem}: {theirs.vocab_size} tokens, not {ours.vocab_size}", field=field)
    for token in range(ours.vocab_size):
        if theirs.token(token) != ours.token(token):
            raise Incompatible(
                f"{problem}: token {token} is {theirs.token(token)!r}, not {ours.token(token)!r}", field=field
            )


def adapter_config(config: TrainingConfig, base_sha256: str) -> AdapterConfig:
    """Return the configuration of a job's adapter."""
    lora = config.lora
    return AdapterConfig(
        r=lora.lora_rank or 1,
        lora_alpha=lora.alpha,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        rank_pattern=lora.ranks,
        alpha_pattern=lora.alphas,
        modules_to_save=lora.modules_to_save,
        trainable_token_indices=lora.trainable_token_indices,
        base_model=config.model.base_model or "",
        base_sha256=base_sha256,
    )


def shapes_of_base(config: TrainingConfig, home: Path) -> tuple[nn.Module, LoraAdapter | None]:
    """Return the base with initial weights and the adapter to train, if any; to be called within `shapes_only`.

    Raises `InvalidValue` for target modules that the base does not have, and for DoRA of experts.
    """
    folder = base_folder(config.model.base_model or "", home)
    built: nn.Module = fresh_model(folder)
    freeze_tower(built)
    if config.lora.lora_rank is None:
        return built, None
    return built, _fresh(built, config, adapter_config(config, ""), folder)


def _fresh(model: Any, config: TrainingConfig, settings: AdapterConfig, folder: Path) -> LoraAdapter:
    lora = config.lora
    try:
        adapter = LoraAdapter.fresh(
            model,
            settings,
            modules=modules_of(model, folder),
            targets=lora.lora_target_modules,
            dropout=lora.lora_dropout,
        )
        require_writable(adapter, model, folder)
    except InvalidValue as error:
        error.metadata["field"] = f"config.lora.{error.metadata['field']}"
        raise
    return adapter


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BaseModel:
    """A loaded base model. Training updates all its weights, or only the adapter while the weights are frozen.

    `tokenizer` is that of the data: the base's own, or another of the same vocabulary, such as one with a template.
    """

    folder: Path
    loaded: LoadedModel
    adapter: LoraAdapter | None
    tokenizer: Tokenizer | None

    @property
    def model(self) -> Any:
        """The model to train; its submodule `lora` is the adapter, if there is one."""
        return self.loaded.model

    @property
    def layout(self) -> str:
        """The `model_type` of the base's folder."""
        return str(read_config(self.folder / "config.json").get("model_type", NativeAdapter.model_type))

    def save(self, target: Path) -> Path:
        """Write the finished model in the layout of its base, or the adapter in PEFT's layout."""
        if self.adapter is not None:
            return write_adapter(target, self.adapter, self.model, self.folder)
        return save_model(
            target,
            self.model,
            self.tokenizer,
            layout=self.layout,
            base=self.loaded,
        )


def load_base(config: TrainingConfig, home: Path, log: Callable[[str], None]) -> BaseModel:
    """Load the base model of a job onto the device of the config, ready to be trained."""
    folder = base_folder(config.model.base_model or "", home)
    stored = config.lora.base_quantization
    loaded = load_model(folder, "float32", device=config.device, quantization=stored, verify="hashes")
    model, named = loaded.model, config.data.tokenizer
    other = not config.data.prepared and named not in (CHARACTER, config.model.base_model)
    tokenizer = Tokenizer.from_folder(tokenizer_folder(named, home)) if other else loaded.tokenizer
    if config.data.format in ("preference", "prompt") or config.on_policy.lmbda is not None:
        disable_dropout(model)
    torch.manual_seed(derived(config.seed, "weights"))
    if config.lora.lora_rank is None:
        for parameter in model.parameters():
            # Weights may be memory-mapped from the file, which must not be modified.
            parameter.data = parameter.data.clone()
            parameter.requires_grad_(parameter.is_floating_point())
        freeze_tower(model)
        return BaseModel(folder=folder, loaded=loaded, adapter=None, tokenizer=tokenizer)
    model.requires_grad_(requires_grad=False)
    adapter = _fresh(model, config, adapter_config(config, weights_sha256(folder)), folder)
    adapted = AdaptedModel(model)
    adapted.always(adapter)
    if stored != "none":
        let_gradients_through(model)
    model.add_module(LORA, adapter)
    model.adapted = adapted
    log(f"training LoRA of rank {config.lora.lora_rank} on {len(adapter)} layers of {folder.name}")
    return BaseModel(folder=folder, loaded=loaded, adapter=adapter, tokenizer=tokenizer)


def freeze_tower(model: nn.Module) -> None:
    """Train no weights of the tower that sees images, if a model has one; its connector to the text is trained."""
    if isinstance(model, VisionDecoder):
        model.vision.requires_grad_(requires_grad=False)


def disable_dropout(model: nn.Module) -> None:
    """Let no layer drop anything: policy and reference would drop other things and differ before the first update, and
    what samples drops nothing.

    The dropout of the model's config, and so of the saved model, stays.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def adapter_of(model: nn.Module) -> LoraAdapter | None:
    """Return the adapter that is trained on a model, if there is one."""
    found = getattr(model, LORA, None)
    return found if isinstance(found, LoraAdapter) else None

"""The model of a job: its config and defaults, and checks that it can be built and fits into memory and on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import torch
from attn_core import Capability, Mechanism, installed
from attn_core.errors import Incompatible, InvalidValue, OutOfCapacity, UnknownName, UserError, WrongState
from attn_core.models import ModelFamily
from attn_core.reinforce import samples_keys
from attn_models.attention import those_that_can
from attn_models.device import resolve_device, total_memory
from attn_schema.decoder import OWN_BIASES
from attn_schema.home import models_folder
from attn_schema.model import DECODER, ModelConfig
from attn_schema.training import DataConfig, TrainingConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_train.base_model import shapes_of_base
from attn_train.checking import require_wanted
from attn_train.data.load import IMAGES, LABELS, PAIRS, TAGS, TEXT, data_kind_of, family_named
from attn_train.layout import check_layout
from attn_train.least_memory import least_batch_bytes, least_parameters, require_few_experts
from attn_train.precision import check_blocks
from attn_train.tasks.packed import require_document_mask
from attn_train.tasks.seq2seq import VOCABULARY

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})
NEW_DRAWS = frozenset({torch.randn, torch.rand})


class _Undrawn(TorchFunctionMode):
    """A mode in which random initialisation is skipped: tensors are left as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require_wanted()
        if func in DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func in NEW_DRAWS:
            # Also where a layer asks for a CPU: nothing may be allocated for what a caller only asks about.
            there = {name: value for name, value in (kwargs or {}).items() if name not in ("generator", "device")}
            return torch.empty(*args, **there, device="meta")
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """A context in which modules are created on the meta device, with shapes but no values.

    Initialisation is skipped, as random numbers on the meta device make torch import its compiler, which takes seconds.
    Raises as `require_wanted` does.
    """
    with torch.device("meta"), _Undrawn():
        yield


TRAINING_BYTES = 16
"""Bytes per parameter in training: the weight, its gradient and two moments, in float32."""

FROZEN_BYTES = 4
"""Bytes per parameter that is not trained."""

CHECKPOINT_BYTES = 12
"""Bytes per trained parameter in a checkpoint: the weight and two moments."""

SPARED_BYTES = {"adamw_8bit": 6}
"""By how many bytes the moments of a parameter are smaller than in float32, by optimizer."""

SPARE_BYTES = 64 << 20
"""Disk space that is kept free for the records of jobs."""

SAMPLE_VOCAB_SIZE = 128
"""Vocabulary size of a decoder in the checks; the real one follows from the text."""

SAMPLE_TAGS = 17
"""The number of universal parts of speech."""

WRITES = {TEXT, PAIRS}
"""The kinds of data that models which generate tokens are trained on."""


def configured(model: ModelConfig, data_fields: Mapping[str, Any]) -> tuple[ModelFamily, Any]:
    """Return the family of a model, and the family's config with the fields that follow from the data.

    Raises `UnknownName` for a family, mechanism or option that does not exist, and other errors with the field of
    `TrainingConfig` in their metadata.
    """
    family, given = family_named(model.family), model.with_defaults().config_fields()
    for name in data_fields:
        if name in given:
            raise InvalidValue.of(
                f"config.model.model_options.{name}", given[name], "none: the value follows from the data"
            )
    with _naming_field(model):
        return family, family.configure({**given, **data_fields})


def resolved(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with defaults for all fields of a decoder, optimizer and schedule that were not given.

    Positions are rotary if the mechanism supports them, as models then learn faster, else learned, which all mechanisms
    support. Blocks are those of a published layout (`_with_block_shape`). Raises `UnknownName` for a mechanism that
    does not exist.
    """
    model, optimizer = config.model.with_defaults(), config.optimizer
    if model.base_model is None and model.family == DECODER and model.positions is None:
        mechanism = installed().mechanisms.get(str(model.mechanism))
        head_dim = model.head_dim or (model.hidden_size or 0) // (model.num_heads or 1)
        # Rotary embeddings rotate pairs of features, so the head size must be even.
        rotary = mechanism.can(Capability.ROTARY) and head_dim % 2 == 0
        model = model.replace(positions="rotary" if rotary else "learned")
    return config.replace(model=_with_block_shape(model), optimizer=optimizer.with_defaults())


LLAMA_BLOCKS = {"norm": "rms", "feed_forward": "swiglu"}
GPT2_BLOCKS = {"norm": "layer", "feed_forward": "gelu_tanh", "bias": True}


def _with_block_shape(model: ModelConfig) -> ModelConfig:
    """The decoder with the blocks of Llama if its positions are rotary, else with those of GPT-2, unless a field of
    the blocks is given: other programs then open what was trained, see `attn models export`. Attention has no biases
    where a layer's mechanism knows none."""
    given = model.config_fields()
    chosen = {"norm_place", "num_experts", *LLAMA_BLOCKS, *GPT2_BLOCKS, *OWN_BIASES} & given.keys()
    if model.family != DECODER or model.base_model is not None or chosen:
        return model
    if model.positions == "rotary":
        return ModelConfig.of(DECODER, given | LLAMA_BLOCKS)
    biases = {} if _takes_biases(model) else dict.fromkeys(("attention_bias", "attention_output_bias"), False)
    return ModelConfig.of(DECODER, given | GPT2_BLOCKS | biases)


def _takes_biases(model: ModelConfig) -> bool:
    """Whether the mechanisms of all layers may have biases."""
    pattern = model.config_fields().get("pattern") or [model.mechanism]
    choices = pattern if isinstance(pattern, list) else []
    names = [choice.get("mechanism") if isinstance(choice, Mapping) else choice for choice in choices]
    return all(installed().mechanisms.get(name).can(Capability.BIAS) for name in names if isinstance(name, str))


def check_model(config: TrainingConfig, home: Path) -> None:
    """Raise an error for the first problem that keeps the model from being trained.

    Raises as `configured` does, and `Incompatible` for a decoder whose mechanism cannot be causal, `InvalidValue` for a
    device that this machine does not have, `OutOfCapacity` if its memory or disk is too small.
    """
    if config.model.base_model is not None:
        _check_base(config, home)
        return
    if config.model.family == DECODER:
        mechanism = installed().mechanisms.get(str(config.model.with_defaults().mechanism))
        if not mechanism.can(Capability.CAUSAL):
            raise _not_causal(mechanism)
    device = _device(config.device)
    batch, spared = least_batch_bytes(config), SPARED_BYTES.get(config.optimizer.optim, 0)

    def admit(made: Any) -> None:
        require_few_experts(made)
        _require_memory(least_parameters(made), device, batch, spared)

    built = model_of_shapes(config.model, config.data, admit)
    check_blocks(built, config)
    check_layout(built, config)
    _check_documents(built, config)
    parameters = _count(built)
    _require_memory(parameters, device, batch + sum(buffer.nbytes for buffer in built.buffers()), spared)
    _require_disk(parameters, config.checkpoint.save_total_limit, home, spared)


def _check_base(config: TrainingConfig, home: Path) -> None:
    device = _device(config.device)
    batch, spared = least_batch_bytes(config), SPARED_BYTES.get(config.optimizer.optim, 0)
    _require_memory(0, device, batch)
    with shapes_only():
        built, adapter = shapes_of_base(config, home)
    check_blocks(built, config)
    check_layout(built, config)
    _check_documents(built, config)
    learned = (built if adapter is None else adapter).parameters()
    trained = sum(parameter.numel() for parameter in learned if parameter.requires_grad)
    frozen = _count(built) - (trained if adapter is None else 0)
    _require_memory(trained, device, FROZEN_BYTES * frozen + batch, spared)
    _require_disk(trained, config.checkpoint.save_total_limit, home, spared)


def _check_documents(built: nn.Module, config: TrainingConfig) -> None:
    if config.data.packs_documents and not config.model.is_encoder_decoder:
        require_document_mask(built)


def count_parameters(model: ModelConfig, data: DataConfig) -> int:
    """Return the number of parameters without allocating them; see `model_of_shapes`."""
    return _count(model_of_shapes(model, data))


def _count(built: nn.Module) -> int:
    return sum(parameter.numel() for parameter in built.parameters())


def _admit_all(_made: Any) -> None:
    """Refuse no config."""


def model_of_shapes(model: ModelConfig, data: DataConfig, admit: Callable[[Any], None] = _admit_all) -> Any:
    """Build the model on the meta device, with a sample vocabulary size in place of that of the data.

    `admit` is called with the family's config before anything is built. Images are read, as the model depends on their
    size. Raises as `configured` and `admit` do.
    """
    family, made = configured(model, _sample_fields(model, data))
    admit(made)
    with _naming_field(model), shapes_only():
        built = family.build(made)
    if getattr(made, "num_nextn_predict_layers", 0) and samples_keys(built):
        message = "layers that sample keys do not support multi-token prediction: num_nextn_predict_layers must be 0"
        raise Incompatible(message, field="config.model.model_options.num_nextn_predict_layers")
    if data_kind_of(model) in WRITES and not hasattr(built, "step"):
        raise InvalidValue.of("config.model.family", model.family, "a family of models that generate tokens")
    return built


def _sample_fields(model: ModelConfig, data: DataConfig) -> Mapping[str, int]:
    kind = data_kind_of(model)
    if kind == IMAGES:
        from attn_train.data.images import load_images

        return load_images(data).model_fields
    vocab_size = SAMPLE_VOCAB_SIZE if model.family == DECODER else VOCABULARY
    return {"vocab_size": vocab_size} | ({"classes": SAMPLE_TAGS} if kind in {TAGS, LABELS} else {})


def _not_causal(mechanism: Mechanism) -> Incompatible:
    able = those_that_can(found.name for found in installed().mechanisms if found.can(Capability.CAUSAL))
    message = f"mechanism {mechanism.name!r} cannot be causal, which a decoder needs; these can: {able}"
    return Incompatible(message, field="config.model.mechanism", mechanism=mechanism.name)


@contextmanager
def _naming_field(model: ModelConfig) -> Iterator[None]:
    """A context in which errors of a model family get the field's path in `TrainingConfig`, except `UnknownName`."""
    try:
        yield
    except UnknownName:
        raise
    except UserError as error:
        raise _with_path(error, model) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidValue(f"{model.label!r} cannot be built for this model: {error}", field="config.model") from error


def _with_path(error: UserError, model: ModelConfig) -> UserError:
    """Set the path of an error's field in `TrainingConfig`, and return the error."""
    field = str(error.metadata.get("field", "mechanism"))
    field = "num_kv_heads" if field.startswith("heads.") else field
    if field not in ModelConfig.__struct_fields__ or field in model.model_options:
        own = field in model.model_options or model.family != DECODER
        field = f"{'model_options' if own else 'options'}.{field}"
    error.metadata["field"] = f"config.model.{field}"
    return error


def _device(name: str) -> torch.device:
    try:
        return resolve_device(name)
    except InvalidValue as error:
        error.metadata["field"] = "config.device"
        raise


def _require_memory(parameters: int, device: torch.device, others: int, spared: int = 0) -> None:
    """Raise `OutOfCapacity` unless the training state of the parameters, which is `spared` bytes smaller for each, and
    `others` bytes fit into the memory."""
    needed = parameters * (TRAINING_BYTES - spared) + others
    # The total, not the free memory: a job may wait for others to end.
    total = total_memory(device)
    where = "this machine" if total is None else str(device)
    total = psutil.virtual_memory().total if total is None else total
    if needed > total:
        raise OutOfCapacity(
            f"training {parameters} parameters with this batch needs at least {needed} bytes of memory; "
            f"{where} has {total}"
        )


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _require_disk(parameters: int, keep: int, home: Path, spared: int) -> None:
    # The kept checkpoints and one that is being written exist at the same time; the finished model is written last.
    needed = parameters * ((CHECKPOINT_BYTES - spared) * (keep + 1) + 4) + SPARE_BYTES
    for folder in (home / "jobs", models_folder(home)):
        try:
            with TemporaryFile(dir=_existing(folder)):
                pass
        except OSError as error:
            problem = f"the server cannot write to {folder}, where a job's checkpoints and its model go"
            raise WrongState(f"{problem}: {error.strerror}") from error
    free = shutil.disk_usage(_existing(home)).free
    if needed > free:
        raise OutOfCapacity(f"the job needs {needed} bytes of disk in {home}; {free} are free")

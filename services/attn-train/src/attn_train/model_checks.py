"""Checks of the model of a job, before it is accepted: it can be built, and memory and disk suffice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from attn_core import Capability, Mechanism, installed
from attn_core.errors import Incompatible, InvalidValue, OutOfCapacity, UnknownName, UserError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_train.data.load import IMAGES, PAIRS, TAGS, TEXT, data_kind_of
from attn_train.spec import DataSpec, FamilyModelSpec, ModelSpec, TrainingSpec
from attn_train.tasks.seq2seq import VOCABULARY

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled at random."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no values.

    Drawing numbers for a tensor without memory makes torch import its compiler, which takes seconds.
    """
    with torch.device("meta"), _Undrawn():
        yield


SAMPLE_TAGS = 17
"""Parts of speech that all languages share."""

WRITES = {TEXT, PAIRS}
"""Subjects of models that write tokens."""


def count_family_parameters(model: FamilyModelSpec, data: DataSpec) -> int:
    """Parameters of the model, built without memory, for a middling vocabulary where the data decide on one.

    Images are read to see how large they are. Raises `UnknownName` or `InvalidValue` with the field as on the wire.
    """
    families = {family.name: family for family in installed().models}
    if model.family not in families:
        raise UnknownName.of("family of models", model.family, families)
    model_fields = _decided(model, data)
    for field in model_fields:
        if field in model.fields:
            raise InvalidValue.of(f"spec.model.family_options.{field}", model.fields[field], "none: the data decide")
    family = families[model.family]
    try:
        config = family.configure(model.values(model_fields))
        with shapes_only():
            built = family.build(config)
    except UserError as error:
        named = error.metadata.get("field")
        error.metadata["field"] = f"spec.model.family_options.{named}" if named else "spec.model.family_options"
        raise
    if data_kind_of(model) in WRITES and not hasattr(built, "step"):
        raise InvalidValue.of("spec.model.family", model.family, "a family of models that write tokens, or empty")
    return sum(parameter.numel() for parameter in built.parameters())


def _decided(model: FamilyModelSpec, data: DataSpec) -> Mapping[str, int]:
    subject = data_kind_of(model)
    if subject == IMAGES:
        from attn_train.data.images import load_images

        return load_images(data).model_fields
    return {"vocab_size": VOCABULARY} | ({"classes": SAMPLE_TAGS} if subject == TAGS else {})


TRAINING_BYTES = 16
"""Bytes a parameter takes while it is trained: itself, its gradient and two moments, in float32."""

CHECKPOINT_BYTES = 12
"""Bytes a parameter takes in a checkpoint."""

SPARE_BYTES = 64 << 20
"""Disk that stays free for the records of jobs."""

SAMPLE_VOCABULARY = 128
"""A vocabulary for the checks; the text decides on the real one."""

FIELDS = {
    "max_seq_len": "context_length",
    "num_kv_heads": "kv_heads",
    "heads.key_value": "kv_heads",
    "norm_place": "norm_placement",
    "feed_forward": "activation",
    "intermediate_size": "feed_forward_size",
    "tie_word_embeddings": "tie_embeddings",
}
"""The wire's names of a decoder's fields, where they differ."""

EXPERTS = ("experts", "experts_per_token", "routing", "router_aux_loss_coef")

WIRE_FIELDS = frozenset(
    {"hidden_size", "num_layers", "num_heads", "head_dim", "norm", "positions", "dropout", *EXPERTS, *FIELDS}
)


def check_model(spec: TrainingSpec, home: Path) -> None:
    """Raises the error of the first thing that would keep the model from being trained.

    UnknownName, with near names, for a mechanism or option; Incompatible for a mechanism that cannot be causal;
    InvalidValue for sizes that do not fit; OutOfCapacity where memory or disk is too small.
    """
    if isinstance(spec.model, FamilyModelSpec):
        parameters = count_family_parameters(spec.model, spec.data)
    else:
        mechanism = installed().mechanisms.get(spec.model.mechanism)
        if not mechanism.can(Capability.CAUSAL):
            raise _not_causal(mechanism)
        parameters = count_parameters(spec.model)
    _require_memory(parameters)
    _require_disk(parameters, spec.checkpoint.keep, home)


def count_parameters(model: ModelSpec) -> int:
    """Parameters of the decoder, built without memory. Raises InvalidValue with the field as on the wire."""
    family = installed().models.get("decoder")
    try:
        config = family.configure(model.values({"vocab_size": SAMPLE_VOCABULARY}))
        with shapes_only():
            built = family.build(config)
    except UnknownName:
        raise
    except UserError as error:
        raise _on_the_wire(error, model) from error
    except (ValueError, TypeError, RuntimeError) as error:
        message = f"mechanism {model.mechanism!r} cannot be built for this model: {error}"
        raise InvalidValue(message, field="spec.model") from error
    return sum(parameter.numel() for parameter in built.parameters())


def _not_causal(mechanism: Mechanism) -> Incompatible:
    able = sorted(found.name for found in installed().mechanisms if found.can(Capability.CAUSAL))
    message = f"mechanism {mechanism.name!r} cannot be causal, which a decoder needs; these can: {', '.join(able)}"
    return Incompatible(message, field="spec.model.mechanism", mechanism=mechanism.name)


def _on_the_wire(error: UserError, model: ModelSpec) -> UserError:
    """The error with the wire's name of its field."""
    field = error.metadata.get("field", "mechanism")
    if field in model.others:
        field = f"spec.model.family_options.{field}"
    elif field in WIRE_FIELDS:
        field = f"spec.model.{FIELDS.get(field, field)}"
    else:
        field = "spec.model.mechanism" if field == "mechanism" else f"spec.model.mechanism.options.{field}"
    error.metadata["field"] = field
    return error


def _require_memory(parameters: int) -> None:
    needed = parameters * TRAINING_BYTES
    # Not what is free now: a job may wait for others to end.
    total = psutil.virtual_memory().total
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    if needed > total:
        raise OutOfCapacity(f"{parameters} parameters need {needed} bytes to be trained; this machine has {total}")


def _require_disk(parameters: int, keep: int, home: Path) -> None:
    # While one checkpoint is written, those that are kept are still there, and the model comes last.
    needed = parameters * (CHECKPOINT_BYTES * (keep + 1) + 4) + SPARE_BYTES
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if needed > free:
        raise OutOfCapacity(f"the job needs {needed} bytes of disk in {home}; {free} are free")

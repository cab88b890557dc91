"""Checks of the model: that it can be built, and that there is room for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import torch
from attn_core import Capability, Mechanism, installed
from attn_core.errors import Incompatible, InvalidValue, OutOfCapacity, UnknownName, UserError

from attn_train.admission.family import count_family_parameters
from attn_train.admission.shapes_only import shapes_only
from attn_train.spec import FamilyModelSpec, ModelSpec, TrainingSpec

TRAINING_BYTES = 16
"""Bytes a parameter takes while it is trained: itself, its gradient and two moments, in float32."""

CHECKPOINT_BYTES = 12
"""Bytes a parameter takes in a checkpoint."""

SPARE_BYTES = 64 << 20
"""Disk that stays free for the records of jobs."""

SAMPLE_VOCABULARY = 128
"""A vocabulary for the checks; the text decides on the real one."""

FIELDS = {
    "context": "context_length",
    "key_value_heads": "kv_heads",
    "heads.key_value": "kv_heads",
    "norm_place": "norm_placement",
    "feed_forward": "activation",
    "hidden": "feed_forward_size",
    "tied": "tie_embeddings",
}
"""The wire's names of a decoder's fields, where they differ."""

EXPERTS = ("experts", "experts_per_token", "routing", "balance")

WIRE_FIELDS = frozenset({"width", "layers", "heads", "head_size", "norm", "positions", "dropout", *EXPERTS, *FIELDS})


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
        config = family.configure(model.values({"vocabulary": SAMPLE_VOCABULARY}))
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
